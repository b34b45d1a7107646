"""One rank of a model replica: its weights, its KV pool, and the forward pass over them.

1. `load` maps the checkpoint and places this rank's part of the weights.
2. `allocate` sizes the pool from the memory that is left; all ranks agree on the smallest size. On a GPU it
   first compiles all kernels and measures the CUDA graphs, and then captures them: a running engine compiles
   and captures nothing.
3. `execute` runs one step: page copies, then the forward pass of the rank's layers; returns logits. In a
   pipeline rank 0 gets them by `answer`. `steps` tells other users of the pages how far the steps have come
   on the device.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, cast

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from baton.adapters import Adapter, AdapterFiles, read_adapter
from baton.config.engine import CacheConfig, EngineConfig
from baton.engine.cache.page_pool import ALWAYS_PASSED, mark_of
from baton.engine.models.adapters import Adapters, AdapterTensors
from baton.engine.models.loading.checkpoint import SafetensorsCheckpoint, fingerprint
from baton.engine.models.loading.weights import Checkpoint, Parameters, Progress, ReportingCheckpoint
from baton.engine.models.model import (
    Model,
    SupportsPipeline,
    adapted_shapes,
    build_model,
    check_parameters,
    dummy_checkpoint,
    parameter_bytes,
    parameter_shapes,
    split_layers,
)
from baton.engine.models.registry import (
    ARCHITECTURES,
    ModelConfig,
    check_supported,
    choose_max_model_len,
    read_model_config,
)
from baton.engine.runner.cuda_graphs import StepGraphs
from baton.engine.runner.replica_rank import PendingTensor, ReplicaRank
from baton.engine.runner.step_inputs import (
    ModelInput,
    StepArrays,
    StepUploads,
    fill_in,
    padding_step,
    warmup_steps,
)
from baton.engine.scheduler.sequence import PageCopy
from baton.errors import ConfigError, ModelError
from baton.kernels.decoder_stack import LayerGroups, OnLayers
from baton.kernels.native import TORCH_DTYPES, huge_zeros
from baton.kernels.pages import copy_runs
from baton.kernels.sample import sample
from baton.pages import PageLayout

logger = logging.getLogger(__name__)

# (shape, dtype) -> zeros for a CPU pool, in memory of the caller's choice
ZerosOnCpu = Callable[[Ordered[int], torch.dtype], Tensor]


class KvPool:
    """`device`, `host`: zeros [pages, num_layers, num_planes, heads_per_rank, page_size, row_elements]."""

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        num_host_pages: int,
        device: torch.device,
        zeros_on_cpu: ZerosOnCpu = huge_zeros,
        host_zeros: ZerosOnCpu | None = None,
    ) -> None:
        """host_zeros: gives the memory of the host pages; None: memory of this process."""
        heads, num_planes = layout.heads_per_rank, layout.num_planes
        shape = (layout.num_layers, num_planes, heads, layout.page_size, layout.row_elements)
        dtype = TORCH_DTYPES[layout.element_type]
        if device.type == "cpu":
            self.device: Tensor = zeros_on_cpu((num_pages, *shape), dtype)
        else:
            self.device = torch.zeros((num_pages, *shape), dtype=dtype, device=device)
        # Page-aligned, for direct reads from a disk. Pinned memory of torch would be a power of two of bytes.
        self.host: Tensor = (host_zeros or huge_zeros)((num_host_pages, *shape), dtype)
        if device.type == "cuda" and num_host_pages:
            _pin(self.host, device, owner=self)

    @torch.inference_mode()
    def copy(self, to_host: Ordered[PageCopy], to_device: Ordered[PageCopy]) -> None:
        """Copy whole pages, first to the host, then to the device.

        On a GPU the copies are not waited for: they are ordered on the current stream, with the steps. No
        other work uses host pages, so a host page may be freed, and taken by a later step, during its copy.
        """
        _copy_pages(self.device, self.host, to_host)
        _copy_pages(self.host, self.device, [(host_page, page) for page, host_page in to_device])


def _copy_pages(source: Tensor, destination: Tensor, copies: Ordered[tuple[int, int]]) -> None:
    """copies: (page of the source, page of the destination).

    On a CPU the calling thread copies. Threads of torch would go on spinning on the cores that kernels need:
    evictions took a sixth of the throughput.
    """
    if not copies:
        return
    if not source.device.type == destination.device.type == "cpu":
        for page, copy in copies:
            destination[copy].copy_(source[page], non_blocking=True)
        return
    page_bytes = source[0].nbytes
    from_N, to_N = np.ascontiguousarray(page_bytes * np.array(copies, dtype=np.int64).T)
    copy_runs(source, destination, from_N, to_N, page_bytes)


def _pin(memory: Tensor, device: torch.device, owner: object) -> None:
    """Pin memory for copies from and to a GPU; unpin it when `owner` is freed, which comes before the memory.

    Where the driver refuses, copies are slower.
    """
    runtime, wait_for = torch.cuda.cudart(), torch.cuda.synchronize
    address, num_bytes = memory.data_ptr(), memory.nbytes
    if status := int(runtime.cudaHostRegister(address, num_bytes, 0)):
        logger.warning("%s bytes of host pages cannot be pinned: CUDA error %d", f"{num_bytes:,}", status)
        _clear_error(device)
        return

    def unpin() -> None:
        wait_for(device)  # no thread has waited for the last copies
        if status := int(runtime.cudaHostUnregister(address)):
            logger.warning("%s bytes of host pages stay pinned: CUDA error %d", f"{num_bytes:,}", status)
            _clear_error(device)

    weakref.finalize(owner, unpin).atexit = False


def _clear_error(device: torch.device) -> None:
    """Have torch raise and forget the error of a refused call, which it does at the next kernel that it
    launches.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def page_bytes(pages: Tensor) -> NDArray[np.uint8]:
    """The same memory as bytes, [num_pages, page_bytes]. The pages are contiguous and not on a GPU."""
    return cast(NDArray[np.uint8], pages.view(torch.uint8).reshape(len(pages), -1).numpy())


# The size of the pool.

DEFAULT_CPU_BYTES: Final = 4 * 2**30
# Of a process, beyond the memory that torch reserves; a cautious guess.
CUDA_CONTEXT_BYTES: Final = 768 * 2**20
MAX_CPU_SHARE: Final = 0.25  # of the available memory
MAX_HOST_BYTES: Final = 8 * 2**30  # of host pages, without a setting
MAX_HOST_SHARE: Final = 1 / 16  # of the available memory, for each rank of each worker on a machine


def count_pages(cache: CacheConfig, layout: PageLayout, device: torch.device, graph_bytes: int = 0) -> int:
    """The number of pages that fit in the configured memory, or in the available memory without a setting.

    graph_bytes: of the available memory, kept for CUDA graphs.
    """
    given = cache.kv_cache_memory_bytes
    if given is None:
        given = max(0, _free_bytes(cache, device) - graph_bytes)
    return given // layout.page_bytes


def count_host_pages(cache: CacheConfig, layout: PageLayout, num_pages: int) -> int:
    """The number of host pages: those of the configured memory, or a part of the available memory.

    num_pages: on the device. Without a setting the host has no more pages than the device, so that a small
    pool has a small host tier. None without prefix caching: nothing would find them.
    """
    if not cache.enable_prefix_caching:
        return 0
    if cache.host_cache_memory_bytes is not None:
        return cache.host_cache_memory_bytes // layout.page_bytes
    num_bytes = min(MAX_HOST_BYTES, int(_available_bytes() * MAX_HOST_SHARE))
    return min(num_pages, num_bytes // layout.page_bytes)


def check_fits(cache: CacheConfig, num_pages: int, layout: PageLayout, max_model_len: int) -> None:
    """ConfigError unless one sequence of `max_model_len` tokens fits in the pool."""
    needed = layout.num_pages(max_model_len)
    if num_pages >= needed:
        return
    given_bytes = cache.kv_cache_memory_bytes or num_pages * layout.page_bytes
    raise ConfigError(
        f"the KV cache holds {num_pages * layout.page_size} tokens, one sequence of max_model_len "
        f"{max_model_len} needs {needed * layout.page_bytes:,} bytes a rank, got "
        f"{given_bytes:,}: raise cache.kv_cache_memory_bytes or lower max_model_len"
    )


def check_memory(config: EngineConfig, model_config: ModelConfig, node: int = 0) -> None:
    """Raise ModelError unless this machine's memory holds the weights of its ranks; on a CPU alone.

    Linux reports the shortage only after the memory is full. A GPU refuses at once. node: this one, counted
    from 0 among the nodes of the worker.
    """
    device = choose_device(config.device, 0)
    if device.type != "cpu":
        return
    layers = _layers_of_node(config, model_config, node) if config.nnodes > 1 else None
    needed = parameter_bytes(model_config, choose_dtype(config.dtype, model_config, device), layers)
    present = psutil.virtual_memory().total
    if needed > present:
        raise ModelError(
            f"{config.model}: {needed:,} bytes of weights; this machine has {present:,} of memory"
        )


def _layers_of_node(config: EngineConfig, model_config: ModelConfig, node: int) -> range:
    sizes = split_layers(model_config, config.pipeline_parallel_size)
    stages_per_node = config.pipeline_parallel_size // config.nnodes
    first, stop = node * stages_per_node, (node + 1) * stages_per_node
    return range(sum(sizes[:first]), sum(sizes[:stop]))


def _available_bytes() -> int:
    """Memory that Linux grants without swapping. File caches count as available."""
    return psutil.virtual_memory().available


def _free_bytes(cache: CacheConfig, device: torch.device) -> int:
    if device.type != "cuda":
        return min(DEFAULT_CPU_BYTES, int(_available_bytes() * MAX_CPU_SHARE))
    free, total = torch.cuda.mem_get_info(device)
    # The caller has loaded the weights and run a full step: later steps need as much memory as that step.
    # Another process may share the device and load at this moment. Its memory reduces the free memory, never
    # our own share.
    peak = torch.cuda.max_memory_reserved(device)
    ours = int(total * cache.gpu_memory_utilization) - peak - CUDA_CONTEXT_BYTES
    return max(0, min(ours, free - (peak - torch.cuda.memory_reserved(device))))


# The rank.


class DeviceSteps:
    """The StepMarks of one rank. The thread that runs the steps calls `make` with growing marks."""

    def __init__(self, device: torch.device) -> None:
        self.launched = ALWAYS_PASSED
        self._passed = ALWAYS_PASSED
        self._device, self._is_cuda = device, device.type == "cuda"
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()  # oldest first
        self._lock = threading.Lock()

    def make(self, mark: int) -> None:
        """Everything before the mark is launched; on a GPU, on the current stream."""
        if not self._is_cuda:
            self.launched = self._passed = mark
            return
        event = torch.cuda.current_stream().record_event()
        with self._lock:
            self._events.append((mark, event))
            self.launched = mark
            self._look()  # else events pile up while no thread calls has_passed

    def has_passed(self, mark: int) -> bool:
        """As `StepMarks.has_passed`."""
        if mark > self._passed and self._is_cuda:
            # The caller's thread may have chosen no GPU: a query would open a context of CUDA on GPU 0.
            with self._lock, torch.cuda.device(self._device):
                self._look()
        return mark <= self._passed

    def _look(self) -> None:
        while self._events and self._events[0][1].query():
            self._passed, _ = self._events.popleft()


class ModelRunner:
    """Runs steps on one rank. `model` and `pool` exist after `load` and `allocate`."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, rank: ReplicaRank) -> None:
        """Called by the thread that runs the steps: its current device and stream change on a GPU."""
        self.config = config
        self.model_config = model_config
        self.rank = rank
        self.tp, self.pp = rank.tp, rank.pp
        self.device = choose_device(config.device, rank.index)
        if self.pp.size > 1 and self.device.type != "cpu":
            raise ConfigError(f"pipeline_parallel_size: stages run on CPUs, not on {self.device}")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # kernels, streams and graphs go where the tensors are
            if torch.cuda.current_stream(self.device).priority != config.stream_priority:
                # The default stream has none. This thread runs the steps, and hands pages to transfers.
                torch.cuda.set_stream(torch.cuda.Stream(self.device, config.stream_priority))
        check_supported(model_config, config)
        self.dtype = choose_dtype(config.dtype, model_config, self.device)
        self.max_model_len = choose_max_model_len(config, model_config)
        self.layout = PageLayout(
            tp_size=self.tp.size,
            page_size=config.cache.page_size,
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            num_planes=model_config.num_kv_planes,
            dtype=self.dtype,
            cache_dtype=config.cache.kv_cache_dtype,
            transfer_dtype=config.cache.kv_transfer_dtype,
            stage_layers=split_layers(model_config, self.pp.size) if self.pp.size > 1 else (),
        )
        self.layers = self.layout.layers_of(rank.index)  # on this rank
        self.own_layout = self.layout.of_stage(rank.index)
        self.model: Model
        self._stage: SupportsPipeline | None = None  # the model, where it has some of the layers
        self.pool: KvPool
        self.steps = DeviceSteps(self.device)
        # On rank 0: the steps that every rank has ended. A step of one stage ends with a sum over all ranks.
        self.replica_steps = self.steps if self.pp.size == 1 else DeviceSteps(self.device)
        self.adapters = Adapters(self.device, adapted_shapes(model_config)) if config.enable_lora else None
        self._graphs: StepGraphs | None = None  # on a GPU, as the uploads
        self._uploads: StepUploads | None = None

    @torch.inference_mode()
    def load(self, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> None:
        """Read the weights, reporting bytes to `progress`. ModelError when they do not fit the model.

        checkpoint: has the weights; None: the files have them.
        """
        config = self.model_config
        checkpoint = checkpoint or open_checkpoint(self.config, config, self.device)
        check_parameters(checkpoint, config)
        expert_ranks = self.tp if self.config.enable_expert_parallel else None
        if progress is not None:
            shapes = parameter_shapes(config, self.layers, expert_ranks)
            checkpoint = ReportingCheckpoint(checkpoint, shapes, progress)
        parameters = Parameters(
            checkpoint,
            self.tp,
            TORCH_DTYPES[self.dtype],
            self.device,
            batch_invariant=self.config.batch_invariant,
            quantization=self.config.quantization,
            scheme=config.quantization,
            adapters=self.adapters,
            layers=self.layers,
            expert_ranks=expert_ranks,
        )
        try:
            self.model = build_model(config, parameters, self.max_model_len)
        except (OSError, OverflowError, RuntimeError) as error:  # the kinds of out-of-memory errors
            num_bytes = parameter_bytes(config, self.layout.dtype) // self.rank.size
            raise ModelError(f"{num_bytes:,} bytes of weights cannot be placed: {error}") from error
        if self.pp.size > 1:
            if not isinstance(self.model, SupportsPipeline):
                message = f"{config.architecture} cannot be split into stages"
                raise ConfigError(f"pipeline_parallel_size: {message}")
            self._stage = self.model

    @torch.inference_mode()
    def allocate(self, zeros_on_cpu: ZerosOnCpu = huge_zeros, host_zeros: ZerosOnCpu | None = None) -> None:
        """Make the pool, on a CPU from `zeros_on_cpu`; see `KvPool`.

        ConfigError when the pool cannot hold one sequence of the longest length.
        """
        cache = self.config.cache
        graph_bytes = self._prepare_gpu() if self.device.type == "cuda" else 0
        layout = self.own_layout
        num_pages = self.rank.smallest(count_pages(cache, layout, self.device, graph_bytes))
        check_fits(cache, num_pages, layout, self.max_model_len)
        num_host_pages = self.rank.smallest(count_host_pages(cache, layout, num_pages))
        try:
            self.pool = KvPool(layout, num_pages, num_host_pages, self.device, zeros_on_cpu, host_zeros)
        except (OSError, OverflowError, RuntimeError) as error:
            num_bytes = (num_pages + num_host_pages) * layout.page_bytes
            raise ConfigError(f"KV pages of {num_bytes:,} bytes cannot be allocated: {error}") from error
        if self._graphs is not None:
            self._graphs.capture(self.pool.device)
        logger.info("%s", self.describe_pool())

    def _prepare_gpu(self) -> int:
        """Compile all kernels, measure the graphs and run the largest step; return the bytes of the graphs.

        Afterwards torch's peak of reserved memory is what steps need beside the graphs and the pool.
        """
        scheduler, max_pages = self.config.scheduler, self.layout.num_pages(self.max_model_len)
        largest_batch, max_num_tokens = scheduler.largest_batch, scheduler.max_num_batched_tokens
        self._uploads = StepUploads(max_num_tokens, largest_batch, max_pages, self.device)
        trial = KvPool(self.layout, 1, 0, self.device).device
        self._put_dummy_adapter()
        for arrays in warmup_steps(max_num_tokens, largest_batch, max_pages):
            self._forward(arrays, trial)
            if self.adapters is not None:
                self._forward(_with_dummy_adapter(arrays), trial)
        model = self.model
        self._graphs = StepGraphs(
            lambda step, kv_pool: model.logits(model.forward(step, kv_pool)),
            self.model_config.vocab_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_pages=max_pages,
            device=self.device,
            stream_priority=self.config.stream_priority,
        )
        graph_bytes = self._graphs.measure_bytes(trial)
        logger.info("CUDA graphs: %.2f GiB", graph_bytes / 2**30)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run_largest_step(has_adapter=self.adapters is not None)
        self.put_adapter(DUMMY_SLOT, None)
        return graph_bytes

    def _put_dummy_adapter(self) -> None:
        """Place an adapter of zeros that changes every layer of this rank that adapters may change."""
        if self.adapters is None:
            return
        rank, shapes = self.config.max_lora_rank, self.adapters.shapes
        pairs = {
            name: (torch.zeros(rank, shapes[name][1]), torch.zeros(shapes[name][0], rank))
            for name in self.adapters.projections
        }
        self.put_adapter(DUMMY_SLOT, AdapterTensors(rank, 1.0, pairs))

    @torch.inference_mode()
    def run_largest_step(self, *, has_adapter: bool = False) -> None:
        """Compute a step that takes as much memory as any may; store nothing.

        It has as many decodes as possible, which keep partial sums of the longest context, and asks for the
        logits of every token, as prompt logprobs do. has_adapter: every token has the adapter of DUMMY_SLOT.
        """
        scheduler = self.config.scheduler
        num_tokens = scheduler.max_num_batched_tokens
        num_decodes = min(scheduler.largest_batch, num_tokens) - 1
        arrays = padding_step(
            num_tokens - num_decodes,
            num_tokens,
            num_decodes=num_decodes,
            num_pages=self.layout.num_pages(self.max_model_len),
        )
        if has_adapter:
            arrays = _with_dummy_adapter(arrays)
        self._forward(arrays, KvPool(self.layout, 1, 0, self.device).device)

    def describe_pool(self) -> str:
        """The size of the pool, for the log."""
        num_pages, page_size = len(self.pool.device), self.layout.page_size
        text = (
            f"KV cache: {num_pages * page_size:,} tokens in {num_pages:,} pages of {page_size} "
            f"({num_pages * self.own_layout.page_bytes / 2**30:.2f} GiB a rank)"
        )
        return f"{text}, {len(self.pool.host):,} host pages" if len(self.pool.host) else text

    @torch.inference_mode()
    def execute(
        self, arrays: StepArrays, on_layers: OnLayers | None = None, last_tokens_R: Tensor | None = None
    ) -> Tensor:
        """Run the step on this rank; every rank of the replica must. Returns logits [R, V] fp32.

        In a pipeline only the last stage returns logits; it sends them to rank 0, see `answer`.
        on_layers: called as this rank has written layers, if the step asks for layer groups. Other ranks may
        be behind: their marks say how far they are.
        last_tokens_R: on rank 0, int64, the tokens that the last step sampled, if the step refers to them.
        """
        if self.adapters is not None and self.rank.index:
            for slot, files in arrays.adapters:
                self.put_adapter(slot, None if files is None else self.adapters.read(files))
        num_tokens = arrays.num_last_tokens
        last_tokens_R = self._share_tokens(num_tokens, last_tokens_R) if num_tokens else None
        groups = self._layer_groups(arrays, on_layers) if arrays.num_layer_groups else None
        try:
            out = self._execute(arrays, groups, last_tokens_R)
        finally:  # the launched part of a failed step ends, too
            self.steps.make(mark_of(arrays.step))
        if self.pp.answers:
            self.pp.answer(out if arrays.sampling is None else sample(out, arrays.sampling))
        return out

    def answer(self, arrays: StepArrays) -> PendingTensor:
        """On rank 0 in a pipeline, after `execute`: the logits, once the last stage has computed the step.

        With the step's sampling parameters, the last stage sends tokens [R] int64 instead. Answers come in
        the order of the steps; each must be asked for.
        """
        num_rows = len(arrays.logit_rows)
        if arrays.sampling is None:
            answer = self.pp.receive_answer(torch.empty(num_rows, self.model_config.vocab_size))
        else:
            answer = self.pp.receive_answer(torch.empty(num_rows, dtype=torch.int64))
        return answer._replace(on_arrival=partial(self._note_answer, mark_of(arrays.step)))

    def _note_answer(self, mark: int) -> None:
        if not self.replica_steps.has_passed(mark):  # the answer to a later step may have been waited for
            self.replica_steps.make(mark)

    def _layer_groups(self, arrays: StepArrays, on_layers: OnLayers | None) -> LayerGroups:
        """Cut this rank's layers where the groups of the replica's layers end.

        A rank reports the groups that end in its layers, and after its last layer all that follow.
        """
        bounds = self.layout.layer_groups(min(arrays.num_layer_groups, self.layout.num_layers))
        first, last = self.layers.start, self.layers.stop
        own = [(max(first, start) - first, min(last, stop) - first) for start, stop in bounds]
        pending = deque(bounds)

        def wrote(_: int, stop: int) -> None:
            while pending and (pending[0][1] <= first + stop or first + stop == last):
                group = pending.popleft()
                self.steps.make(mark_of(arrays.step, group[1]))
                if on_layers is not None:
                    on_layers(*group)

        return LayerGroups([(start, stop) for start, stop in own if start < stop], wrote)

    @torch.inference_mode()
    def read_adapter(self, adapter: Adapter) -> tuple[AdapterFiles, AdapterTensors]:
        """Read and check an adapter, from any thread; the files are for the other ranks, if there are any.

        Raises ModelError when the files are not those of the digest, or do not fit the model.
        """
        assert self.adapters is not None
        files = read_adapter(adapter.path, self.config.max_lora_rank)
        if files.digest != adapter.digest:
            raise ModelError(f"{adapter.path}: the files have changed since the adapter was loaded")
        tensors = self.adapters.read(files)
        return (files if self.rank.size > 1 else files._replace(weights=b"")), tensors

    @torch.inference_mode()
    def put_adapter(self, slot: int, tensors: AdapterTensors | None) -> None:
        """Place this rank's part of an adapter in a slot; None: leave the slot free.

        On a GPU every adapter has the highest rank, by zeros: another rank would compile other kernels.
        """
        if self.adapters is None:
            return
        if tensors is not None and self.device.type == "cuda":
            tensors = _padded(tensors, self.config.max_lora_rank)
        self.adapters.put(slot, tensors)

    def _share_tokens(self, num_tokens: int, tokens_R: Tensor | None) -> Tensor:
        """Rank 0 samples; return its tokens on every rank."""
        if tokens_R is None:
            tokens_R = torch.empty(num_tokens, dtype=torch.int64, device=self.device)
        return self.tp.broadcast(tokens_R)

    def _execute(
        self, arrays: StepArrays, groups: LayerGroups | None, last_tokens_R: Tensor | None
    ) -> Tensor:
        self.pool.copy(arrays.copies_to_host, arrays.copies_to_device)
        if not len(arrays.token_ids):
            return self._end_copies()
        has_graph = self._graphs is not None and not len(arrays.adapter_slots)
        shape = self._graphs.shape_of(arrays) if self._graphs is not None and has_graph else None
        if self._graphs is None or shape is None or (groups is not None and shape.num_tokens):
            return self._forward(arrays, self.pool.device, groups, last_tokens_R)
        logits_RV = self._graphs.replay(arrays, shape, last_tokens_R)
        if groups is not None:
            groups.on_layers(0, len(self.layers))
        return logits_RV

    def _end_copies(self) -> Tensor:
        """Return no logits, on the last stage after every rank of the replica has copied the step's pages."""
        token = torch.zeros(1)
        if not self.pp.is_first:
            self.pp.receive(token)
        empty_RV = self.tp.all_reduce(torch.empty((0, self.model_config.vocab_size), device=self.device))
        if not self.pp.is_last:
            self.pp.send_on(token)
        return empty_RV

    def _forward(
        self,
        arrays: StepArrays,
        kv_pool: Tensor,
        groups: LayerGroups | None = None,
        last_tokens_R: Tensor | None = None,
    ) -> Tensor:
        uploads = self._uploads
        step = ModelInput.from_arrays(arrays) if uploads is None else uploads.upload(arrays)
        if last_tokens_R is not None:
            fill_in(step.token_ids_T[: arrays.num_decodes], last_tokens_R)
        if self.adapters is None:
            return self._run_layers(step, kv_pool, groups)
        with self.adapters.step(arrays.adapter_slots, arrays.logit_rows):
            return self._run_layers(step, kv_pool, groups)

    def _run_layers(self, step: ModelInput, kv_pool: Tensor, groups: LayerGroups | None) -> Tensor:
        """Logits from the last pipeline stage; from the others, hidden states that are on their way."""
        model, stage, pp = self.model, self._stage, self.pp
        if stage is None:
            return model.logits(model.forward(step, kv_pool, groups))
        received_TE = None
        if not pp.is_first:
            shape = len(step.token_ids_T), self.model_config.hidden_size
            received_TE = pp.receive(torch.empty(shape, dtype=TORCH_DTYPES[self.dtype], device=self.device))
        hidden = stage.forward(step, kv_pool, groups, received_TE)
        if pp.is_last:
            return stage.logits(hidden)
        pp.send_on(hidden)
        return hidden


DUMMY_SLOT: Final = 0  # free again when a request may have an adapter


def _with_dummy_adapter(arrays: StepArrays) -> StepArrays:
    return arrays._replace(adapter_slots=np.full(len(arrays.token_ids), DUMMY_SLOT, np.int32))


def _padded(tensors: AdapterTensors, rank: int) -> AdapterTensors:
    """The adapter with zeros up to the rank: the product of its matrices is the same."""
    missing = rank - tensors.rank
    pairs = {
        name: (functional.pad(a_RK, (0, 0, 0, missing)), functional.pad(b_NR, (0, missing)))
        for name, (a_RK, b_NR) in tensors.pairs.items()
    }
    return AdapterTensors(rank, tensors.scale, pairs)


def open_checkpoint(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> Checkpoint:
    """The weights that the configuration names. Raises ModelError."""
    if config.load_format == "dummy":
        return dummy_checkpoint(model_config, config.seed, device)
    base_prefix = ARCHITECTURES[model_config.architecture].base_prefix
    return SafetensorsCheckpoint(Path(config.model), base_prefix)


def model_fingerprint(config: EngineConfig) -> str:
    """Return the fingerprint of the model with weights and rotary factors as the configuration loads them.

    Raises ModelError, and ConfigError for a length that the model does not have.
    """
    directory = Path(config.model)
    model_config = read_model_config(directory)
    scaling, has_long_factors = model_config.rope.scaling, None
    if scaling.rope_type == "longrope":
        has_long_factors = scaling.uses_long_factors(choose_max_model_len(config, model_config))
    return fingerprint(
        directory,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        quantization=config.quantization,
        has_long_factors=has_long_factors,
    )


def choose_device(name: str, rank: int) -> torch.device:
    """The device of a rank. `auto` takes a GPU when there is one; rank r of a group takes GPU r.

    ConfigError when there is no such GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: expected a CUDA device, but torch finds none on this machine: check the driver and "
            "torch.version.cuda, or compute on a CPU (--device cpu)"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if rank >= num_gpus:  # ranks on one GPU could not be joined: NCCL refuses them
        raise ConfigError(
            f"device: rank {rank} of the worker needs a GPU of its own, and this process sees {num_gpus}: "
            "lower tensor_parallel_size, or name more GPUs in CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", rank)


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> str:
    """The dtype of the model. `auto` is the checkpoint's, but float32 for float16 on a CPU, which has no such
    kernels.
    """
    if name != "auto":
        return name
    if model.dtype == "float16" and device.type == "cpu":
        logger.warning("float16 weights are computed in float32: the CPU kernels take no float16")
        return "float32"
    return model.dtype
