import pytest

from baton.gateway.api.errors import ApiError
from baton.gateway.api.served_models import ServedModels
from tests.node_peers import a_worker
from tests.scripted_service import ScriptedService
from tests.unit.gateway.calls import TENANT, served_model
from tests.unit.gateway.frontend_peers import gateway


def test_before_the_first_worker_clients_hear_when_to_retry() -> None:
    with pytest.raises(ApiError, match="^no worker has joined yet") as refused:
        served_model(gateway().frontend).read_policy(TENANT).check_length(1)
    headers = dict(refused.value.headers())
    assert (refused.value.status, headers[b"retry-after"], headers[b"x-should-retry"]) == (503, b"2", b"true")


def test_without_workers_the_last_known_context_length_holds() -> None:
    made = gateway("d0")
    model = served_model(made.frontend)
    length = model.read_policy(TENANT).longest()
    made.list_members()
    assert not made.frontend.workers
    model.read_policy(TENANT).check_length(length - 1)
    with pytest.raises(ApiError, match="one of them for the answer"):
        model.read_policy(TENANT).check_length(length)
    with pytest.raises(ApiError, match="the prompt is empty") as refused:
        model.read_policy(TENANT).check_length(0)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "b", "prompt": "x"}', "b"),
        (b'{"prompt": "x"}', "a"),
        (b'{"model": null}', "a"),
        (b'{"model": "c"}', "a"),
        (b'{"model": 5}', "a"),
        (b'{"model": {"model": "b"}}', "a"),
        (b'["b"]', "a"),
        (b"no json", "a"),
        (b"\xff\xfe", "a"),
    ],
)
def test_body_is_read_for_the_model_that_it_names_and_else_for_the_first(body: bytes, name: str) -> None:
    service = ScriptedService()
    models = ServedModels([served_model(service, name=each, key=each) for each in ("a", "b")])
    assert models.of_body(body).name == name


def test_served_model_has_its_own_workers_alone() -> None:
    service = ScriptedService()
    service.workers = [
        a_worker("d0", model="a", max_model_len=10),
        a_worker("d1", model="b", max_model_len=20),
    ]
    of_key = {key: served_model(service, key=key) for key in ("a", "b", "")}
    assert {key: model.view.max_model_len for key, model in of_key.items()} == {"a": 10, "b": 20, "": 10}
