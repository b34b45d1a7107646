"""The application of Ray Serve that tells KubeRay's RayService about a cluster. It serves no requests.

`baton serve` runs in the head's pod, and its gateways answer clients. Ray Serve starts one actor beside it.
The actor is ready once Baton has answered a request through a prefill and a decode worker, and unhealthy when
its gateways do not answer. So KubeRay sends clients to a new cluster only when it serves; then the old one
drains.

    import_path: baton.cluster.runtimes.ray_service:application
"""

import http.client
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from baton.cluster.runtimes.base import LOOPBACK
from baton.errors import reason_of

LOOK_EVERY_S: Final = 1.0
TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


class GatewayWatch:
    """Ray Serve's actor, which watches the gateways at a port of its machine, the head."""

    def __init__(self, port: int) -> None:
        """Wait until the gateways answer. Ray Serve waits for this call."""
        self._port = port
        while (reason := self._why_not("/health")) is not None:
            logger.info("Baton does not answer yet: %s", reason)
            time.sleep(LOOK_EVERY_S)

    def check_health(self) -> None:
        """Raise RuntimeError when no gateway answers. Ray Serve calls this every few seconds."""
        reason = self._why_not("/ping")
        if reason is not None:
            raise RuntimeError(f"no gateway of Baton lives at port {self._port}: {reason}")

    def __call__(self, request: object) -> str:
        return f"Baton itself answers, at port {self._port}\n"

    def _why_not(self, path: str) -> str | None:
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return reason_of(error)
        finally:
            connection.close()
        return None if status == 200 else f"{path} has status {status}"


def application(arguments: Mapping[str, str]) -> Any:
    """Return the application. arguments: `port` of the gateways. Needs ray[serve]."""
    from ray import serve

    # The head has no cores to give, and this node's own resource keeps the actor on it.
    options = {"num_cpus": 0, "resources": {"baton_head": 0.001}}
    deployment: Any = serve.deployment(
        GatewayWatch, name="baton", num_replicas=1, ray_actor_options=options, health_check_period_s=5
    )
    return deployment.bind(int(arguments["port"]))
