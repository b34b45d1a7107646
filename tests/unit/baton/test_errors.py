import pytest

from baton import errors
from baton.errors import BatonError, reason_of


def test_every_error_is_a_baton_error() -> None:
    own = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(own) > 1
    assert all(issubclass(error, BatonError) for error in own)


@pytest.mark.parametrize("error", [errors.ConfigError, errors.ModelError, errors.InvalidRequest])
def test_errors_of_the_caller_are_value_errors(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


def test_reason_of_an_error_is_in_plain_words() -> None:
    assert reason_of(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory"
    assert reason_of(TimeoutError("timed out")) == "timed out"
    assert reason_of(ConnectionError()) == "ConnectionError"
    with pytest.raises(UnicodeDecodeError) as found:
        b"\xff".decode()
    assert reason_of(found.value) == "it is not text in UTF-8"
