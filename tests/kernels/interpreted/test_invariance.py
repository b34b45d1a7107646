"""The GPU path under Triton's interpreter: no setting changes a bit of any token or log probability."""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from baton.config.engine import RankSidecar
from baton.kernels import linear, paged_attention
from baton.kernels.experts import experts_triton
from baton.kernels.paged_attention import paged_attention_decode_triton
from baton.kernels.prefill_attention import prefill_attention_triton
from baton.kernels.quantised import WeightFormat
from baton.request import SamplingParams, StepOutput
from tests.kernels.attention_cases import PagedKv, Shape, paged_kv
from tests.kernels.cases import mixture_of_rank, random_mixture
from tests.kernels.outcomes import DTYPES, normal, short
from tests.kernels.quantised_cases import FORMATS, of_codes, random_matrix
from tests.parity.runs import engine, run
from tests.tiny_models import write_config

slow = pytest.mark.slow


def in_dtypes(small: int, large: int, *largest: int) -> list[ParameterSet]:
    """Return each size in each dtype. `make test` has the small size in fp32, and the large one in bf16."""
    sizes = (small, large, *largest)
    return [
        pytest.param(
            size,
            dtype,
            id=f"{size}-{short(dtype)}",
            marks=[] if (size, dtype) in ((small, torch.float32), (large, torch.bfloat16)) else slow,
        )
        for size, dtype in product(sizes, DTYPES)
    ]


CPU = torch.device("cpu")
MAX_MODEL_LEN = 320  # more than the keys of the first split
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3, prompt_logprobs=0)
PROMPTS = [
    [(7 * index + shift) % 131 for index in range(length)] for length, shift in ((3, 1), (30, 2), (258, 3))
]

SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler": {"max_num_batched_tokens": 48}},
    "alone": {"scheduler": {"max_num_seqs": 1}},
    "page-1": {"cache": {"page_size": 1}},
    "page-64": {"cache": {"page_size": 64}},
}
RANKS: dict[str, dict[str, Any]] = {
    "tensor-parallel-2": {"tensor_parallel_size": 2},
    "expert-parallel-2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


@cache
def outputs(
    directory: Path, dtype: str, setting: str = "", num_prompts: int = 3, codes: str | None = None
) -> list[list[StepOutput]]:
    """codes: the format of weights and of KV pages."""
    sidecar = RankSidecar(factory="tests.kernels.interpreted.matrix_unit:MatrixUnit", arguments="")
    settings: dict[str, Any] = (SETTINGS | RANKS).get(setting, {})
    if codes is not None:
        cache = {**settings.get("cache", {}), "kv_cache_dtype": codes}
        settings = {**settings, "quantization": codes, "cache": cache}
    with engine(directory, sidecar, load_format="dummy", dtype=dtype, **settings) as made:
        return run(made, PROMPTS[:num_prompts], GREEDY)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return write_config(path, max_position_embeddings=MAX_MODEL_LEN, num_hidden_layers=1)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=slow)])
@pytest.mark.parametrize("setting", ["chunks", *(pytest.param(each, marks=slow) for each in [*SETTINGS][1:])])
def test_no_setting_changes_a_bit(setting: str, dtype: str, directory: Path) -> None:
    assert outputs(directory, dtype, setting) == outputs(directory, dtype)


def test_a_second_rank_changes_no_bit(directory: Path) -> None:
    """In fp32: the interpreter cuts bf16 off where torch, which adds the ranks, rounds."""
    two_ranks = outputs(directory, "float32", "tensor-parallel-2", num_prompts=2)
    assert two_ranks == outputs(directory, "float32", num_prompts=2)


@slow
@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_a_second_rank_changes_no_bit_of_weights_and_pages_of_one_byte(codes: str, directory: Path) -> None:
    on_one_rank, on_two_ranks = (
        outputs(directory, "float32", setting, num_prompts=1, codes=codes)
        for setting in ("", "tensor-parallel-2")
    )
    assert on_one_rank == on_two_ranks


@slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_changes_a_bit_of_codes_in_bf16(setting: str, directory: Path) -> None:
    assert outputs(directory, "bfloat16", setting, codes="int8") == outputs(
        directory, "bfloat16", codes="int8"
    )


@slow
@pytest.mark.parametrize(
    ("num_experts", "settings"), [(5, ("chunks", "tensor-parallel-2")), (6, ("expert-parallel-2",))]
)
def test_no_setting_changes_a_bit_of_a_mixture_of_experts(
    num_experts: int, settings: tuple[str, ...], tmp_path: Path
) -> None:
    keys = {"num_local_experts": num_experts, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    mixture = write_config(
        tmp_path, architectures=["MixtralForCausalLM"], max_position_embeddings=MAX_MODEL_LEN, **keys
    )
    plain = outputs(mixture, "float32", num_prompts=2)
    for setting in settings:
        assert outputs(mixture, "float32", setting, num_prompts=2) == plain


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("latent") / "tiny",
        architectures=["DeepseekV3ForCausalLM"],
        max_position_embeddings=MAX_MODEL_LEN,
        num_hidden_layers=1,
        num_attention_heads=18,  # two tiles of rows for one kv head
        kv_lora_rank=20,
        q_lora_rank=24,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=0,
    )


@slow
@pytest.mark.parametrize("setting", ["chunks", "page-1", "tensor-parallel-2", "expert-parallel-2"])
def test_no_setting_changes_a_bit_of_latent_attention(setting: str, latent: Path) -> None:
    plain = outputs(latent, "float32", num_prompts=2)
    assert outputs(latent, "float32", setting, num_prompts=2) == plain


# The kernels alone, in every dtype.

SHAPES = (
    Shape(page_size=16, num_kv_heads=2, group_size=3, head_dim=16),
    Shape(page_size=4, num_kv_heads=1, group_size=1, head_dim=40, window=300),
    Shape(page_size=4, num_kv_heads=1, group_size=2, head_dim=16, codes=torch.int8),
    Shape(page_size=4, num_kv_heads=1, group_size=2, head_dim=40, value_dim=24),
)


def attend(kv: PagedKv, query_THD: Tensor, shape: Shape, context_len: int) -> Tensor:
    """Prefill of the tokens before context_len, as many as the query has."""
    return prefill_attention_triton(
        query_THD,
        kv.pages,
        kv.page_table,
        torch.tensor([0, len(query_THD)], dtype=torch.int32),
        torch.tensor([context_len], dtype=torch.int32),
        scale=shape.scale,
        window=shape.window,
        value_dim=shape.value_dim,
        max_seqlen_q=len(query_THD),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=("grouped", "window", "codes", "latent"))
@pytest.mark.parametrize(("num_keys", "dtype"), in_dtypes(60, 530, 4400))
def test_attention_of_a_token_is_the_same_in_decode_and_in_any_chunk(
    num_keys: int, shape: Shape, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_new = 40
    kv = paged_kv([num_keys], shape, dtype, CPU)
    query = normal(num_new, shape.num_heads, shape.head_dim, dtype=dtype, device=CPU)
    whole = attend(kv, query, shape, num_keys)
    cut = [
        attend(kv, query[start : start + 7], shape, min(num_keys, num_keys - num_new + start + 7))
        for start in range(0, num_new, 7)
    ]
    assert torch.equal(whole, torch.cat(cut))
    table, lens = (
        kv.page_table.expand(3, -1).contiguous(),
        torch.tensor([num_keys, 5, num_keys], dtype=torch.int32),
    )
    for target in (1, 3, paged_attention.TARGET_PROGRAMS):
        monkeypatch.setattr(paged_attention, "TARGET_PROGRAMS", 3 * shape.num_kv_heads * target)
        decoded = paged_attention_decode_triton(
            query[-1:].expand(3, -1, -1),
            *(kv.pages, table, lens),
            scale=shape.scale,
            window=shape.window,
            value_dim=shape.value_dim,
        )
        assert torch.equal(decoded[0], whole[-1]) and torch.equal(decoded[2], whole[-1])


@pytest.mark.parametrize("num_tokens", [48, 64, 200])
@pytest.mark.parametrize("window", [None, 128])
def test_padding_reads_no_page(window: int | None, num_tokens: int) -> None:
    """Keys at negative positions would be those of the page table's row before."""
    pages = torch.full((2, 2, 1, 16, 16), 3.0, dtype=torch.bfloat16)
    tables = torch.tensor([[1] * 64, [0] * 64], dtype=torch.int32)
    query = normal(num_tokens, 4, 16, dtype=torch.bfloat16, device=CPU)
    out = prefill_attention_triton(
        query,
        pages,
        tables[1:],
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        scale=0.25,
        window=window,
        max_seqlen_q=num_tokens,
    )
    assert not out.any()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(("num_inputs", "dtype"), in_dtypes(40, 2304))
def test_product_of_a_token_is_the_same_in_any_batch(
    num_inputs: int, num_splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(70, num_inputs, dtype=dtype, device=CPU)
    weight = linear.pack_linear(normal(150, num_inputs, dtype=dtype, device=CPU))
    bias = normal(150, dtype=torch.float32, device=CPU)
    multiply = partial(linear.linear_triton, num_splits=num_splits, out_dtype=torch.float32)
    together = multiply(x, weight, bias)
    for first, last in ((0, 1), (3, 40), (69, 70)):
        assert torch.equal(multiply(x[first:last], weight, bias), together[first:last])
    monkeypatch.setattr(linear, "NUM_MULTIPROCESSORS", 1)  # too few for the tiles: a program sums a whole one
    assert torch.equal(
        multiply(x, replace(weight, arrivals=torch.zeros(1, dtype=torch.int32)), bias), together
    )


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda each: each.name.lower())
@pytest.mark.parametrize("num_groups", [1, pytest.param(9, marks=slow)])
def test_product_of_codes_is_the_same_in_any_batch_and_on_two_ranks(
    weight_format: WeightFormat, num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, half = torch.bfloat16, 128 * num_groups
    matrix = random_matrix(weight_format, 70, 2 * half, 128)
    x, weight = normal(70, 2 * half, dtype=dtype, device=CPU), of_codes(matrix, dtype, CPU)
    multiply = partial(linear.linear_triton, out_dtype=torch.float32)
    together = multiply(x, weight, num_splits=2)
    for first, last in ((0, 1), (63, 66)):
        assert torch.equal(multiply(x[first:last], weight, num_splits=2), together[first:last])
    ranks = [of_codes(each, dtype, CPU) for each in matrix.chunk_inputs(2)]
    halves = [multiply(part, rank) for part, rank in zip(x[:3].split(half, 1), ranks, strict=True)]
    assert torch.equal(halves[0] + halves[1], together[:3])
    monkeypatch.setattr(linear, "NUM_MULTIPROCESSORS", 1)  # too few for the tiles: a program sums a whole one
    one = replace(weight, arrivals=torch.zeros(1, dtype=torch.int32))
    assert torch.equal(multiply(x[:3], one, num_splits=2), together[:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_two_ranks_add_what_one_rank_adds(dtype: torch.dtype) -> None:
    num_inputs = 2304
    x, weight = (normal(number, num_inputs, dtype=dtype, device=CPU) for number in (5, 70))
    parts = [
        linear.linear_triton(x[:, part], linear.pack_linear(weight[:, part]), out_dtype=torch.float32)
        for part in (slice(0, num_inputs // 2), slice(num_inputs // 2, None))
    ]
    whole = linear.linear_triton(x, linear.pack_linear(weight), num_splits=2, out_dtype=torch.float32)
    assert torch.equal(parts[0] + parts[1], whole)


@pytest.mark.parametrize("is_biased", [pytest.param(False, marks=slow), True])
def test_two_ranks_with_whole_experts_add_what_one_rank_adds(is_biased: bool) -> None:
    """In fp32: the interpreter cuts bf16 off where torch, which adds the ranks, rounds."""
    made = random_mixture(5, torch.float32, CPU, is_biased=is_biased)
    x, logits = (normal(40, width, dtype=torch.float32, device=CPU) for width in (24, 6))
    sums = [
        experts_triton(x, logits, mixture_of_rank(made, first, stop), None if first else x)
        for first, stop in ((0, 3), (3, 5))
    ]
    assert torch.equal((sums[0] + sums[1]).sum(0), experts_triton(x, logits, made, x))
