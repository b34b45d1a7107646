"""Gemma 2 and 3 (text): norms before and after each part, GeGLU, scaled embeddings, windows in turn."""

import torch
from torch import Tensor

from baton.engine.models.decoder import Decoder, DecoderLayer, then
from baton.engine.models.layers import Attention, GatedMlp, Norm, RmsNorm
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig, RopeConfig, is_windowed, read_rope_config
from baton.engine.runner.step_inputs import ModelInput
from baton.errors import ModelError
from baton.kernels.gated import GELU_TANH, soft_cap

OFFSET = 1.0  # of the weights of all norms


class Gemma2(Decoder):
    """Reads the soft caps, `query_pre_attn_scalar`, `attention_bias` and the windows of the layers."""

    qk_norm = False
    every_full = 2  # without `layer_types`: every so many layers see the whole context

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys, bias = config.keys, config.keys.flag("attention_bias")
        if keys.flag("use_bidirectional_attention"):
            raise ModelError(f"{keys.source}: 'use_bidirectional_attention' is not supported")
        pattern = keys.count("sliding_window_pattern", self.every_full)
        has_window = is_windowed(config, index, otherwise=(index + 1) % pattern != 0)
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            bias=bias,
            qk_norm="head" if self.qk_norm else None,
            norm_offset=OFFSET,
            window=keys.count("sliding_window", 4096) if has_window else None,
            scale=keys.positive("query_pre_attn_scalar", 256.0) ** -0.5,
            softcap=self.softcap(config, "attn_logit_softcapping", 50.0),
            rope=self.rope(config, has_window=has_window),
        )
        mlp = GatedMlp(config, parameters.scope("mlp"), activation=GELU_TANH)
        return DecoderLayer(
            config,
            parameters,
            attention,
            then(mlp, self.make_norm(config, parameters, "post_feedforward_layernorm")),
            out=then(attention.out, self.make_norm(config, parameters, "post_attention_layernorm")),
            input_norm=self.make_norm(config, parameters, "input_layernorm"),
            post_norm=self.make_norm(config, parameters, "pre_feedforward_layernorm"),
        )

    def make_norm(self, config: ModelConfig, parameters: Parameters, name: str) -> Norm:
        """As `Decoder.make_norm`."""
        return RmsNorm(parameters, name, config.hidden_size, config.rms_norm_eps, offset=OFFSET)

    def rope(self, config: ModelConfig, *, has_window: bool) -> RopeConfig:
        """The rotary embedding of a layer with or without a window."""
        return config.rope

    def softcap(self, config: ModelConfig, name: str, default: float) -> float | None:
        """The value of a soft cap; null means none."""
        return None if config.keys.is_null(name) else config.keys.positive(name, default)

    def embed(self, step: ModelInput) -> Tensor:
        """As `Decoder.embed`: times the root of the size, which is rounded as the weights are."""
        x_TE = self.embedding(step.token_ids_T)
        return x_TE.mul_(float(torch.tensor(self.config.hidden_size**0.5).to(x_TE.dtype)))

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """As `Model.logits`."""
        logits_RV = super().logits(hidden_RE)
        cap = self.softcap(self.config, "final_logit_softcapping", 30.0)
        return logits_RV if cap is None else soft_cap(logits_RV.contiguous(), cap)


class Gemma3(Gemma2):
    """Norms of queries and keys instead of soft caps, and a rotary embedding for layers with windows."""

    qk_norm = True
    every_full = 6

    def softcap(self, config: ModelConfig, name: str, default: float) -> float | None:
        """As `Gemma2.softcap`. Attention has no soft cap and ignores the config's, as in transformers."""
        is_final = name == "final_logit_softcapping"
        return config.keys.positive(name) if is_final and name in config.keys else None

    def rope(self, config: ModelConfig, *, has_window: bool) -> RopeConfig:
        """As `Gemma2.rope`. Older configs name the base of layers with windows `rope_local_base_freq`."""
        keys = config.keys
        if not has_window:
            return config.rope
        if "sliding_attention" in keys.section("rope_parameters"):
            return read_rope_config(keys, "sliding_attention")
        return RopeConfig(theta=keys.positive("rope_local_base_freq", 10000.0))
