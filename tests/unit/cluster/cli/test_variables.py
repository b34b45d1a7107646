import pytest

from baton.cluster.cli.settings import check_variables
from baton.config.environment import VARIABLES
from baton.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("BATON_PREFIL_NUM_WORKERS", "BATON_PREFILL_NUM_WORKERS"),
        ("BATON_PREFILL", "BATON_PREFILL_NUM_WORKERS"),
        ("BATON_MAX_MODEL_LEN", "BATON_ENGINE_MAX_MODEL_LEN"),
        ("BATON_CACHEDIR", "BATON_CACHE_DIR"),
        ("BATON_TENANT", "BATON_TENANTS"),
    ],
)
def test_a_variable_that_sets_nothing_is_told_with_the_one_that_was_meant(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown variable {given}; did you mean {meant}\?$"):
        check_variables({given: "2"})


def test_what_is_known_and_what_others_set_is_let_be() -> None:
    check_variables(dict.fromkeys(VARIABLES, "x"))
    check_variables({"BATON_UID": "0", "BATON_GID": "0", "BATON_TWIRLING": "yes"})
    check_variables({"BATON_STRICT": "true", "BATON_LOCAL_PREFILL_TOKENS": "1"})  # of other commands
    check_variables(
        {
            "BATON_SERVICE_HOST": "10.0.0.1",
            "BATON_SERVICE_PORT_HTTP": "8000",
            "BATON_PORT_8000_TCP_ADDR": "10.0.0.1",
            "BATON_GATEWAY_PORT": "tcp://10.0.0.1:8000",
        }
    )
