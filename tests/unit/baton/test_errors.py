import pytest

from baton import errors
from baton.errors import BatonError, Overloaded


def test_every_error_hangs_on_the_one_tree() -> None:
    own = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(own) > 1
    assert all(issubclass(error, BatonError) for error in own)


@pytest.mark.parametrize("error", [errors.ConfigError, errors.ModelError, errors.InvalidRequest])
def test_what_the_caller_got_wrong_is_a_value_error(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


def test_overload_says_when_to_come_back() -> None:
    error = Overloaded("queue is full", retry_after_s=1.5)
    assert (str(error), error.retry_after_s) == ("queue is full", 1.5)
