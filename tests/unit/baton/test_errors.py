import pytest

from baton import errors
from baton.errors import BatonError


def test_every_error_is_a_baton_error() -> None:
    own = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(own) > 1
    assert all(issubclass(error, BatonError) for error in own)


@pytest.mark.parametrize("error", [errors.ConfigError, errors.ModelError, errors.InvalidRequest])
def test_errors_of_the_caller_are_value_errors(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)
