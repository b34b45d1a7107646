"""From a configuration to an engine that is ready to step."""

import os
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch

from baton.clock import Clock, SystemClock
from baton.config.engine import EngineConfig, RankSidecar
from baton.config.environment import cache_directory, prepare_nccl
from baton.engine.cache.kv_pool import ZerosOnCpu
from baton.engine.engine import Engine
from baton.engine.models.checkpoint import fingerprint
from baton.engine.models.parallel import TensorParallel
from baton.engine.models.parameters import parameter_bytes
from baton.engine.models.registry import ModelConfig, check_split, read_model_config
from baton.engine.models.weights import Progress
from baton.engine.runner.model_runner import ModelRunner, choose_device, choose_dtype
from baton.engine.runner.tp_worker import TpWorkers
from baton.errors import ConfigError, ModelError
from baton.kernels import native
from baton.kernels.huge_pages import huge_zeros


def load_engine(
    config: EngineConfig,
    *,
    clock: Clock | None = None,
    progress: Progress | None = None,
    zeros_on_cpu: ZerosOnCpu = huge_zeros,
    sidecar: RankSidecar | None = None,
) -> Engine:
    """Load the model on all ranks; ranks other than 0 are processes that end when the engine is closed.

    Raises ModelError for what is wrong with the directory, ConfigError for what does not fit the machine, and
    WorkerLost when another rank ends or hangs meanwhile. On a CPU rank 0's KV pool lies in `zeros_on_cpu`.
    Each of the other ranks has a `sidecar` of its own, which gives its pool's memory; all have started on
    return.
    """
    native.keep_builds_in(cache_directory())
    prepare_nccl()
    directory = Path(config.model).resolve()
    config = msgspec.structs.replace(config, model=str(directory))  # other ranks start in another folder
    model = read_model_config(directory)
    check_split(model, config.tensor_parallel_size)
    _check_memory(model, config)
    tp_workers = TpWorkers(config, sidecar) if config.tensor_parallel_size > 1 else None
    try:
        runner = ModelRunner(config, model, tp_workers.tp if tp_workers else TensorParallel())
        with tp_workers.telling_why() if tp_workers else nullcontext():
            runner.load(progress)
            _allocate(runner, zeros_on_cpu)
            if sidecar is not None:
                runner.tp.smallest(0)  # the ranks meet here once their companions have started
        name = fingerprint(directory, dummy_seed=config.seed if config.load_format == "dummy" else None)
        return Engine(runner, clock or SystemClock(), name, tp_workers)
    except BaseException:
        if tp_workers:
            tp_workers.close(timeout_s=0.0)
        raise


def _check_memory(model: ModelConfig, config: EngineConfig) -> None:
    """ModelError when a CPU's ranks could not hold the weights with all memory there is: no kernel says so
    before it has filled it. A GPU refuses by itself.
    """
    device = choose_device(config.device, 0)
    if device.type != "cpu":
        return
    needed = parameter_bytes(model, choose_dtype(config.dtype, model, device))
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present:
        raise ModelError(
            f"{config.model}: {needed:,} bytes of weights; this machine has {present:,} of memory"
        )


def _allocate(runner: ModelRunner, zeros_on_cpu: ZerosOnCpu) -> None:
    try:
        runner.allocate(zeros_on_cpu)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the device has no memory for the largest step: lower scheduler.max_num_batched_tokens or "
            f"scheduler.max_num_seqs: {error}"
        ) from error
