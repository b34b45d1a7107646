"""What to say of a library that is not there."""


def install(extra: str = "") -> str:
    """The command; with the path of a checkout, for PyPI's package named baton is somebody else's."""
    return f"pip install '.[{extra}]', in Baton's checkout" if extra else "pip install ., in Baton's checkout"
