"""The architectures that Baton knows, and the config of a model, read from a Hugging Face directory.

Both spellings of `config.json` are read: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that
of transformers 5 (`rope_parameters`, `dtype`). A key that would change the tokens and is not supported is
refused. This module imports no torch: `baton serve` reads the config before any worker starts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

from baton.config.engine import EngineSettings
from baton.engine.models.loading.checkpoint import (
    DENSE_METHODS,
    MAX_COUNT,
    JsonObject,
    Quantization,
    read_json,
    read_quantization,
)
from baton.errors import ConfigError, ModelError
from baton.pages import DTYPE_BYTES
from baton.tokenizer_file import read_end_token

T = TypeVar("T")
RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
ROPE_TYPES: Final[tuple[RopeType, ...]] = get_args(RopeType)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The difference of a model's frequencies from the plain ones; names as in its `config.json`.

    `original_max_positions` is the context the model was trained on before it was stretched; llama3,
    yarn and longrope need it. Fields that the type does not use are ignored.
    """

    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope; None: from factor (and mscale)
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp
    short_factor: tuple[float, ...] = ()  # longrope: of each frequency, within the original context
    long_factor: tuple[float, ...] = ()  # longrope: of each frequency, in longer ones

    def __post_init__(self) -> None:
        if not 0 < attention_factor(self) < math.inf:
            raise ValueError(
                f"mscale {self.mscale} and mscale_all_dim {self.mscale_all_dim} make the attention factor "
                f"{attention_factor(self)}, which must be positive and finite"
            )

    def uses_long_factors(self, max_positions: int) -> bool:
        """True for longrope where positions exceed the original context: all positions then have them."""
        return self.rope_type == "longrope" and max_positions > self.original_max_positions


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of cosines and sines: 1 except for yarn and longrope."""
    if scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        if scaling.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_positions))
    if scaling.mscale and scaling.mscale_all_dim:
        divisor = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return yarn_mscale(scaling.factor, scaling.mscale) / divisor if divisor else math.inf
    return yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, scale: float) -> float:
    """Yarn's factor of queries and keys for a context that is stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The rotary position embedding of a model, or of its layers of one type."""

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling()
    rotated_share: float = 1.0  # of each head, its first dimensions; 0: none are rotated

    def rotary_dim(self, head_dim: int) -> int:
        """The dimensions of each head that are rotated."""
        return int(head_dim * self.rotated_share)


def read_rope_config(keys: JsonObject, layer_type: str = "full_attention") -> RopeConfig:
    """Read the rotary embedding from a config.json, in the older or the newer spelling.

    layer_type: of the layers, where the config has an embedding for each type.
    """
    name = "rope_parameters" if "rope_parameters" in keys else "rope_scaling"
    rope = keys.section(name)
    if layer_type in rope:
        rope = rope.section(layer_type)
    kind = rope.get("rope_type", str) or rope.get("type", str) or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in ROPE_TYPES:
        raise ModelError(f"{rope.source}: type {kind!r} is not known; known are {', '.join(ROPE_TYPES)}")
    share = rope.positive("partial_rotary_factor", keys.positive("partial_rotary_factor", 1.0))
    if share > 1:
        raise ModelError(f"{rope.source}: 'partial_rotary_factor' should be at most 1, got {share}")
    theta = rope.positive("rope_theta", keys.positive("rope_theta", 10000.0))
    try:
        return RopeConfig(theta=theta, scaling=_scaling(kind, rope, keys), rotated_share=share)
    except ValueError as error:
        raise ModelError(f"{rope.source}: {error}") from None


def _scaling(kind: str, rope: JsonObject, keys: JsonObject) -> RopeScaling:
    match kind:
        case "linear":
            return RopeScaling(rope_type="linear", factor=rope.positive("factor"))
        case "llama3":
            return _llama3(rope, keys)
        case "yarn":
            return _yarn(rope, keys)
        case "longrope":
            return _longrope(rope, keys)
        case _:
            return RopeScaling()


def _original_context(rope: JsonObject, keys: JsonObject) -> int:
    name = "original_max_position_embeddings"  # at the top level it wins over the one inside
    return keys.count(name, rope.count(name, keys.count("max_position_embeddings")))


def _llama3(rope: JsonObject, keys: JsonObject) -> RopeScaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise ModelError(f"{rope.source}: 'high_freq_factor' {high} should exceed 'low_freq_factor' {low}")
    return RopeScaling(
        rope_type="llama3",
        factor=rope.positive("factor"),
        original_max_positions=_original_context(rope, keys),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _longrope(rope: JsonObject, keys: JsonObject) -> RopeScaling:
    original = _original_context(rope, keys)
    return RopeScaling(
        rope_type="longrope",
        factor=rope.positive("factor", keys.count("max_position_embeddings") / original),
        original_max_positions=original,
        attention_factor=rope.positive("attention_factor") if "attention_factor" in rope else None,
        short_factor=tuple(rope.require("short_factor", list[float])),
        long_factor=tuple(rope.require("long_factor", list[float])),
    )


def _yarn(rope: JsonObject, keys: JsonObject) -> RopeScaling:
    original = _original_context(rope, keys)
    factor = rope.positive("factor", keys.count("max_position_embeddings") / original)
    beta_fast, beta_slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise ModelError(f"{rope.source}: 'beta_fast' {beta_fast} should be at least 'beta_slow' {beta_slow}")
    if rope.positive("extrapolation_factor", 1.0) != 1:
        raise ModelError(f"{rope.source}: 'extrapolation_factor' other than 1 is not supported")
    given = rope.get("attention_factor", float)
    scaling = RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=None if given is None else rope.positive("attention_factor"),
        mscale=rope.get("mscale", float),
        mscale_all_dim=rope.get("mscale_all_dim", float),
        truncate=rope.flag("truncate", True),
    )
    if given is not None or "attn_factor" not in rope:
        return scaling
    return replace(scaling, attention_factor=attention_factor(scaling) * rope.positive("attn_factor"))


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that all architectures share, checked; an architecture reads its own keys from `keys`."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of keys
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    num_kv_planes: int = 2  # keys and values; 1: latent attention, where values are a part of the keys
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the weights as saved
    initializer_range: float = 0.02  # standard deviation of dummy weights
    quantization: Quantization | None = None  # of the checkpoint
    keys: JsonObject = JsonObject({}, "config.json")  # the whole config.json

    @property
    def num_experts(self) -> int:
        """The experts of a layer with a mixture of experts; ModelError without such a key."""
        name = "num_experts" if "num_experts" in self.keys else "num_local_experts"
        return self.keys.count(name)

    @property
    def has_experts(self) -> bool:
        """True for a model with a mixture of experts in some layer."""
        return "num_experts" in self.keys or "num_local_experts" in self.keys

    @property
    def active_share(self) -> float:
        """The share of the experts that a token goes through; ModelError as `num_experts`."""
        return self.keys.count("num_experts_per_tok") / self.num_experts


LayerType: TypeAlias = Literal["full_attention", "sliding_attention"]


def read_window(config: ModelConfig, default: int | None = None) -> int | None:
    """The key `sliding_window`; None where it is null. default: the window without the key."""
    keys, name = config.keys, "sliding_window"
    if name in keys:
        return keys.count(name)
    return None if keys.is_null(name) else default


def read_layer_types(config: ModelConfig) -> list[LayerType] | None:
    """The kind of attention of each layer, by the key `layer_types`; None without the key."""
    keys = config.keys
    layer_types = keys.get("layer_types", list[LayerType])
    if layer_types is not None and len(layer_types) != config.num_layers:
        raise ModelError(
            f"{keys.source}: 'layer_types' should have {config.num_layers} entries, got {len(layer_types)}"
        )
    return layer_types


def is_windowed(config: ModelConfig, index: int, *, otherwise: bool) -> bool:
    """Whether a layer has a sliding window, by the key `layer_types`; `otherwise` without the key."""
    layer_types = read_layer_types(config)
    return otherwise if layer_types is None else layer_types[index] == "sliding_attention"


class Architecture(NamedTuple):
    """One entry of `ARCHITECTURES`."""

    model_type: str  # names the architecture in a config.json without `architectures`
    factory: str  # "package.module:Class" of a `Model`; imported when a model is built
    head_dim: int | None = None  # without the key `head_dim`; None: hidden_size / num_attention_heads
    activation: tuple[str, str] = ("hidden_act", "silu")  # the key of the activation, and the one supported
    names: Mapping[str, str] = {}  # of keys that the architecture spells in another way
    tie_word_embeddings: bool = False  # without the key
    mlp_ratio: int | None = None  # intermediate_size / hidden_size without the key `intermediate_size`
    base_prefix: str = ""  # that names of a checkpoint may lack
    quant_methods: tuple[str, ...] = DENSE_METHODS  # of `quantization_config`, that the architecture reads
    is_latent: bool = False  # multi-head latent attention


_GPT2_NAMES: Final = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "rms_norm_eps": "layer_norm_epsilon",
}
_GELU: Final = ("hidden_activation", "gelu_pytorch_tanh")
_DEEPSEEK_NAMES: Final = {"num_experts": "n_routed_experts"}
# class name in `architectures` of a config.json -> architecture
ARCHITECTURES: Final[dict[str, Architecture]] = {
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2", "baton.engine.models.deepseek:Deepseek", is_latent=True, names=_DEEPSEEK_NAMES
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3", "baton.engine.models.deepseek:Deepseek", is_latent=True, names=_DEEPSEEK_NAMES
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", "baton.engine.models.gemma:Gemma2", 256, _GELU, tie_word_embeddings=True
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text", "baton.engine.models.gemma:Gemma3", 256, _GELU, tie_word_embeddings=True
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        "baton.engine.models.gpt2:Gpt2",
        activation=("activation_function", "gelu_new"),
        names=_GPT2_NAMES,
        tie_word_embeddings=True,
        mlp_ratio=4,
        base_prefix="transformer.",
        quant_methods=(),
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss", "baton.engine.models.gpt_oss:GptOss", 64, quant_methods=("mxfp4",)
    ),
    "GraniteForCausalLM": Architecture("granite", "baton.engine.models.granite:Granite"),
    "LlamaForCausalLM": Architecture("llama", "baton.engine.models.llama:Llama"),
    "MistralForCausalLM": Architecture("mistral", "baton.engine.models.mistral:Mistral"),
    "MixtralForCausalLM": Architecture("mixtral", "baton.engine.models.mistral:Mixtral"),
    "Olmo2ForCausalLM": Architecture("olmo2", "baton.engine.models.olmo2:Olmo2"),
    "Phi3ForCausalLM": Architecture("phi3", "baton.engine.models.phi3:Phi3"),
    "Qwen2ForCausalLM": Architecture("qwen2", "baton.engine.models.qwen:Qwen2"),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", "baton.engine.models.qwen:Qwen2Moe"),
    "Qwen3ForCausalLM": Architecture("qwen3", "baton.engine.models.qwen:Qwen3", head_dim=128),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", "baton.engine.models.qwen:Qwen3Moe"),
}
MAX_LAYERS: Final = 4096  # bounds the memory that a damaged file can demand


def read_model_config(directory: Path) -> ModelConfig:
    """Read `config.json`; the end tokens of `generation_config.json` win over its own.

    The tokenizer's own end token always counts as well, as in vLLM. Raises ModelError, naming the key and the
    file, for a key that is missing, invalid or not supported.
    """
    keys = read_json(directory / "config.json")
    architecture = _architecture(keys)
    spelling = ARCHITECTURES[architecture]
    keys = keys.renamed(spelling.names)
    _refuse_unsupported(keys, spelling)
    num_layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
    vocab_size = keys.count("vocab_size")
    num_heads, num_kv_heads, head_dim = _latent_heads(keys) if spelling.is_latent else _heads(keys, spelling)
    generation = directory / "generation_config.json"
    tokens = read_json(generation).merged(keys) if generation.exists() else keys
    return ModelConfig(
        architecture=architecture,
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count(
            "intermediate_size", spelling.mlp_ratio and spelling.mlp_ratio * keys.count("hidden_size")
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=keys.count("max_position_embeddings"),
        rms_norm_eps=keys.positive("rms_norm_eps"),
        rope=read_rope_config(keys),
        num_kv_planes=1 if spelling.is_latent else 2,
        tie_word_embeddings=keys.flag("tie_word_embeddings", spelling.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(tokens, read_end_token(directory), vocab_size),
        dtype=_dtype(keys),
        initializer_range=keys.positive("initializer_range", 0.02),
        quantization=read_quantization(keys, spelling.quant_methods),
        keys=keys,
    )


def _architecture(keys: JsonObject) -> str:
    named = keys.get("architectures", list[str])
    model_type = keys.get("model_type", str)
    if named is None and model_type is None:
        raise ModelError(f"{keys.source}: key 'architectures' is missing")
    by_type = {each.model_type: name for name, each in ARCHITECTURES.items()}
    architecture = named[0] if named else by_type.get(model_type or "", str(model_type))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{keys.source}: architecture {architecture!r} is not known; known are {known}")
    return architecture


def _refuse_unsupported(keys: JsonObject, architecture: Architecture) -> None:
    name, supported = architecture.activation
    activation = keys.get(name, str) or supported
    if activation != supported:
        raise ModelError(f"{keys.source}: {name!r} should be {supported!r}, got {activation!r}")


def _latent_heads(keys: JsonObject) -> tuple[int, int, int]:
    """All query heads share one key: the latent vector and a rotated part."""
    latent_dim, rope_dim = keys.count("kv_lora_rank"), keys.count("qk_rope_head_dim")
    for name, size in (("kv_lora_rank", latent_dim), ("qk_rope_head_dim", rope_dim)):
        if size % 2:
            raise ModelError(f"{keys.source}: {name!r} should be even, got {size}")
    return keys.count("num_attention_heads"), 1, latent_dim + rope_dim


def _heads(keys: JsonObject, architecture: Architecture) -> tuple[int, int, int]:
    hidden_size = keys.count("hidden_size")
    num_heads = keys.count("num_attention_heads")
    num_kv_heads = keys.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{keys.source}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly"
        )
    default = architecture.head_dim
    if "head_dim" in keys or default is not None:
        head_dim = keys.count("head_dim", default)
    else:
        if hidden_size % num_heads:
            raise ModelError(
                f"{keys.source}: 'hidden_size' {hidden_size} is not a multiple of {num_heads} attention heads"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"{keys.source}: rotary embedding needs an even head dimension, got {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _dtype(keys: JsonObject) -> str:
    dtype = keys.get("dtype", str) or keys.get("torch_dtype", str) or "float32"
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{keys.source}: 'dtype' should be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return dtype


def _eos_token_ids(tokens: JsonObject, tokenizer_end: int | None, vocab_size: int) -> tuple[int, ...]:
    ids = tokens.integers("eos_token_id")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ModelError(
                f"{tokens.source}: 'eos_token_id' should be in [0, {vocab_size}), got {token_id}"
            )
    if tokenizer_end is None or tokenizer_end in ids or not 0 <= tokenizer_end < vocab_size:
        return ids
    return (*ids, tokenizer_end)


def choose_max_model_len(config: EngineSettings, model: ModelConfig) -> int:
    """The configured length, or the model's: `max_position_embeddings`, or yarn's context if that is longer.

    ConfigError for more tokens than the model has positions. With linear scaling it has positions for
    `max_position_embeddings` times the factor, but the model's length may have the factor already.
    """
    scaling, length = model.rope.scaling, model.max_position_embeddings
    if scaling.rope_type == "yarn":
        length = max(length, int(min(scaling.original_max_positions * scaling.factor, MAX_COUNT)))
    most = length
    if scaling.rope_type == "linear":
        most = max(length, int(min(length * scaling.factor, MAX_COUNT)))
    asked = config.max_model_len
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_model_len: the model has positions for {most} tokens, got {asked}; config.json has "
            f"max_position_embeddings {model.max_position_embeddings} and {scaling.rope_type} rope"
        )
    return asked or length


def read_draft_model_config(settings: EngineSettings, target: ModelConfig) -> ModelConfig | None:
    """The configuration of the draft model, if the settings name one.

    Raises ModelError for an invalid directory, and ConfigError when the vocabulary is not the target's.
    """
    if settings.speculative is None or settings.speculative.model is None:
        return None
    model = read_model_config(Path(settings.speculative.model))
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative.model: expected the target's vocabulary of {target.vocab_size} tokens, "
            f"got {model.vocab_size}"
        )
    return model


def check_supported(model: ModelConfig, settings: EngineSettings) -> None:
    """ConfigError for settings that do not fit the weights of the model, or that latent attention does not
    support.
    """
    if settings.quantization is not None and model.quantization is not None:
        raise ConfigError(
            f"quantization: {settings.quantization} was asked for, but the weights are in "
            f"{model.quantization.method} already: leave quantization out"
        )
    if model.num_kv_planes == 2:
        return
    for name, chosen in (
        ("cache.kv_cache_dtype", settings.cache.kv_cache_dtype),
        ("cache.kv_transfer_dtype", settings.cache.kv_transfer_dtype),
    ):
        if chosen != "auto":
            raise ConfigError(f"{name}: {model.architecture} supports 'auto', got {chosen!r}")
    if settings.enable_lora:
        raise ConfigError(f"enable_lora: {model.architecture} takes no adapters")


def check_stages(model: ModelConfig, num_stages: int) -> None:
    """ConfigError unless each of so many pipeline stages can have a layer."""
    if num_stages > model.num_layers:
        raise ConfigError(f"{model.num_layers} layers cannot be split over {num_stages} pipeline stages")


def check_split(model: ModelConfig, settings: EngineSettings) -> None:
    """ConfigError unless the model can be split evenly over the tensor-parallel ranks.

    With expert parallelism the widths of layers without experts are checked when they are read.
    """
    num_ranks = settings.tensor_parallel_size
    sizes = {"KV heads": model.num_kv_heads, "attention heads": model.num_heads}
    if settings.enable_expert_parallel:
        sizes["experts"] = model.num_experts
    else:
        sizes["intermediate_size"] = model.intermediate_size
    for what, size in sizes.items():
        has_copies = what == "KV heads" and num_ranks % size == 0  # several ranks hold a head
        if size % num_ranks and not has_copies:
            raise ConfigError(f"{what}: {size} cannot be split over {num_ranks} tensor-parallel ranks")


def check_experts(model: ModelConfig, settings: EngineSettings) -> None:
    """ConfigError for expert parallelism of a model without experts."""
    if settings.enable_expert_parallel and not model.has_experts:
        raise ConfigError(f"expert parallelism: {model.architecture} has no experts")


# setting -> the check that it fits the model; run in this order: the second check needs a model with experts
RANK_CHECKS: Final[Mapping[str, Callable[[ModelConfig, EngineSettings], None]]] = {
    "enable_expert_parallel": check_experts,
    "tensor_parallel_size": check_split,
    "pipeline_parallel_size": lambda model, settings: check_stages(model, settings.pipeline_parallel_size),
}
