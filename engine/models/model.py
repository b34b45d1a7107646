"""A model as the runner sees it, and the parameters that a model needs."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from itertools import accumulate
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from baton.engine.models.loading.checkpoint import Shape
from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.engine.models.loading.weights import Checkpoint, Parameters, ParameterSurvey
from baton.engine.models.parallel import TensorParallel
from baton.engine.models.registry import ARCHITECTURES, ModelConfig, check_stages
from baton.engine.runner.step_inputs import ModelInput
from baton.errors import ConfigError, ModelError
from baton.kernels.decoder_stack import LayerGroups
from baton.kernels.native import TORCH_DTYPES
from baton.pages import DTYPE_BYTES


class Model(Protocol):
    """One rank's part of a decoder-only transformer.

    A class that is listed in `ARCHITECTURES` takes (config, parameters, max_model_len) and declares each of
    its parameters, with its Hugging Face name and shape, by reading it from `parameters`.
    """

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; w: position p sees (p - w, p]; None: all positions before it."""

    def forward(self, step: ModelInput, kv_pool: Tensor, groups: LayerGroups | None = None) -> Tensor:
        """Final hidden states [R, E] of the rows in `step.logit_rows_R`, normed.

        Writes the KV of the step's tokens into kv_pool [num_pages, num_layers, num_planes, K, page_size, D].
        groups: learns which layers are written while the pass runs.
        """

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V] fp32, on every rank."""


@runtime_checkable
class SupportsPipeline(Model, Protocol):
    """A model that can be split into pipeline stages, each with some of the layers."""

    is_first: bool  # this stage has the embedding
    is_last: bool  # this stage has the norm and the head

    def forward(
        self,
        step: ModelInput,
        kv_pool: Tensor,
        groups: LayerGroups | None = None,
        received_TE: Tensor | None = None,
    ) -> Tensor:
        """As `Model.forward`; the pool has this stage's layers, and groups count from the first of them.

        Stages before the last one return the hidden states [T, E] that the next stage goes on with.
        received_TE: those of the stage before, used up; None: the first stage embeds the tokens.
        """


def build_model(config: ModelConfig, parameters: Parameters, max_model_len: int) -> Model:
    """Make the model of `config.architecture` with weights from `parameters`."""
    module, _, name = ARCHITECTURES[config.architecture].factory.partition(":")
    model: Model = getattr(import_module(module), name)(config, parameters, max_model_len)
    return model


LAYER_TIME: Final = 1.2  # of a layer of a decode step on a CPU, over that of its matrix products alone


def split_layers(config: ModelConfig, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage. ConfigError for more stages than layers.

    The split minimises the time of the slowest stage in a decode step, which multiplies by each weight once.
    The output head counts in the last stage.
    """
    check_stages(config, num_stages)
    layers, head = _layer_weights(config, _survey(config)[0]), config.vocab_size * config.hidden_size
    until = [*accumulate((LAYER_TIME * layers[index] for index in range(config.num_layers)), initial=0.0)]
    # Of the first n layers in some stages: the time of the slowest stage, and the layers of each.
    splits: dict[int, tuple[float, tuple[int, ...]]] = {n: (time, (n,)) for n, time in enumerate(until)}
    for stage in range(1, num_stages):
        extra = head if stage == num_stages - 1 else 0
        splits = {
            stop: min(
                (max(slowest, until[stop] - until[first] + extra), (*sizes, stop - first))
                for first, (slowest, sizes) in splits.items()
                if stage <= first < stop
            )
            for stop in range(stage + 1, config.num_layers + 1)
        }
    return splits[config.num_layers][1]


def parameter_shapes(
    config: ModelConfig, layers: range | None = None, expert_ranks: TensorParallel | None = None
) -> dict[str, Shape]:
    """Name -> shape of every parameter, in the order in which the model reads them.

    layers: of the pipeline stage that reads them; None: the whole model. expert_ranks: as in `Parameters`.
    """
    return _survey(config, layers, expert_ranks)[0].shapes


def adapted_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    """Name -> shape [N, K] of the weight of each linear layer that adapters may change."""
    return _survey(config)[0].adapted_layers


def parameter_bytes(config: ModelConfig, dtype: str, layers: range | None = None) -> int:
    """Bytes of the parameters in `dtype`. layers: of the pipeline stages that read them; None: all."""
    survey, _ = _survey(config, layers)
    return sum(
        math.prod(shape) * survey.stored_bytes.get(name, DTYPE_BYTES[dtype])
        for name, shape in survey.shapes.items()
    )


def attention_mlp_crossover(config: ModelConfig) -> float:
    """The context length at which attention to the context costs a token as much as all weights of the
    layers.

    Counted in operations; inf if every layer has a sliding window. Of experts, those that a token chooses
    count.
    """
    survey, model = _survey(config)
    num_weights = sum(_layer_weights(config, survey).values())
    num_full = sum(window is None for window in model.windows)
    return num_weights / (2 * config.num_heads * config.head_dim * num_full) if num_full else math.inf


def _layer_weights(config: ModelConfig, survey: ParameterSurvey) -> Mapping[int, float]:
    """Layer -> the elements of all matrices that a token is multiplied by there."""
    plain = {name: shape for name, shape in survey.shapes.items() if name not in survey.stored_bytes}
    weights: defaultdict[int, float] = defaultdict(float)
    for name, shape in (plain | survey.weights).items():
        layer = re.search(r"\.(\d+)\.", name)
        if shape[1:] and layer is not None:
            weights[int(layer[1])] += math.prod(shape) * (config.active_share if ".experts." in name else 1)
    return weights


# Tensors that older exports saved although they follow from the config.
DERIVED: Final = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# Scales of inputs and of KV, which are computed in each step or not needed.
UNUSED_SCALES: Final = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")


def check_parameters(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelError naming the first tensor that is missing, has another shape, or is not in the model.

    An extra tensor is an error as well: a bias that the config does not mention would change the tokens. GPTQ
    checkpoints may have a bias for each quantised layer, all zeros where the model has none.
    """
    shapes = parameter_shapes(config)
    names = set(checkpoint.names())
    for name, expected in shapes.items():
        if name not in names:
            raise ModelError(f"the checkpoint lacks tensor {name!r} of shape {list(expected)}")
        got = checkpoint.shape(name)
        if got != expected:
            raise ModelError(f"tensor {name!r} should have shape {list(expected)}, got {list(got)}")
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    derived = DERIVED if config.quantization is None else DERIVED + UNUSED_SCALES
    for name in sorted(names - shapes.keys() - ignored):
        if name.endswith(derived) or _is_of_mtp_layer(name, config):
            continue
        if not _is_zero_gptq_bias(name, checkpoint, shapes):
            raise ModelError(
                f"tensor {name!r} is not part of {config.architecture} as config.json describes it"
            )


def _is_zero_gptq_bias(name: str, checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> bool:
    module, _, part = name.rpartition(".")
    if part != "bias" or f"{module}.g_idx" not in shapes:  # of quantised layers, in GPTQ alone
        return False
    return not checkpoint.slice(name, 0, 0, checkpoint.shape(name)[0]).any()


def _is_of_mtp_layer(name: str, config: ModelConfig) -> bool:
    """Return whether the tensor is of a layer for multi-token prediction (MTP): such layers are not used."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    num_mtp_layers = config.keys.get("num_nextn_predict_layers", int) or 0
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < num_mtp_layers


def dummy_checkpoint(config: ModelConfig, seed: int, device: torch.device) -> DummyCheckpoint:
    """Random weights for a config without a checkpoint (`load_format="dummy"`).

    ConfigError: the config describes quantised weights.
    """
    if config.quantization is not None:
        raise ConfigError(f"load_format dummy: weights in {config.quantization.method} cannot be made up")
    return DummyCheckpoint(
        parameter_shapes(config),
        dtype=TORCH_DTYPES[config.dtype],
        deviation=config.initializer_range,
        seed=seed,
        device=device,
    )


def _survey(
    config: ModelConfig, layers: range | None = None, expert_ranks: TensorParallel | None = None
) -> tuple[ParameterSurvey, Model]:
    survey = ParameterSurvey(config.quantization, layers, expert_ranks)
    return survey, build_model(config, survey, max_model_len=1)
