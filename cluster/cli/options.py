"""Generates the options of commands from the structs that hold the settings.

An option sets one key of a struct. The option's name follows from the key unless FLAGS names the option. Its
help is the setting's comment. Its text is read like an environment variable of the setting. Options that are
not given stay absent from the parsed arguments: only the structs have defaults and limits.
"""

import argparse
import difflib
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    Union,
    get_args,
    get_origin,
)

import msgspec

from baton.config.loader import comments, from_text, leaves
from baton.errors import USER_ERROR, ConfigError

PREFIXED: Final = ("prefill", "decode", "planner")  # the flags of their settings begin with the owner's name
# A setting's key -> its flags, where they do not follow from the key.
FLAGS: Final = {
    "model_name": "--served-model-name",
    "other_models": "--model",
    "tenants_file": "--tenants",
    "policy": "--router-policy",
    "router.policy": "--router-policy",
    "prefill.num_workers": "--prefill",
    "prefill.tensor_parallel_size": "--prefill-tp",
    "prefill.pipeline_parallel_size": "--prefill-pp",
    "prefill.enable_expert_parallel": "--prefill-ep",
    "prefill.page_size": "--prefill-block-size --prefill-page-size",
    "decode.num_workers": "--decode",
    "decode.tensor_parallel_size": "--decode-tp",
    "decode.pipeline_parallel_size": "--decode-pp",
    "decode.enable_expert_parallel": "--decode-ep",
    "decode.page_size": "--decode-block-size --decode-page-size",
    "planner.mode": "--planner",
    "engine.tensor_parallel_size": "--tensor-parallel-size -tp",
    "engine.pipeline_parallel_size": "--pipeline-parallel-size -pp",
    "engine.quantization": "--quantization -q",
    "engine.seed": "--engine-seed --seed",
    "engine.logits_processors": "--logits-processor --logits-processors",
    "engine.speculative": "--speculative-config",
    "engine.scheduler.policy": "--scheduler-policy",
    "engine.cache.page_size": "--block-size --page-size",
    "engine.cache.kv_cache_memory_bytes": "--kv-cache-memory --kv-cache-memory-bytes",
    "engine.cache.host_cache_memory_bytes": "--host-cache-memory",
    "engine.cache.kv_disk_bytes": "--kv-disk-size",
}
# The last part of a key -> the placeholder of its value in the help, where the type does not tell it.
METAVARS: Final = {
    "host": "ADDRESS",
    "kv_disk_path": "DIRECTORY",
    "ray_address": "ADDRESS",
    "redis": "URL",
    "otlp_traces_endpoint": "URL",
    "chat_template": "FILE",
    "tool_call_parser": "NAME",
    "reasoning_parser": "NAME",
    "override_generation_config": "JSON",
    "default_chat_template_kwargs": "JSON",
    "cluster_key_file": "FILE",
    "decision_log": "FILE",
    "allowed_origins": "ORIGINS",
    "tenants": "FILE",
    "tenants_file": "FILE",
    "times": "FILE",
    "log": "FILE",
    "stop_token_ids": "IDS",
    "allowed_token_ids": "IDS",
    "bad_words_token_ids": "JSON",
    "extra_args": "JSON",
    "preferred_batch_sizes": "SIZES",
    "logit_bias": "ID:X",
    "structured_outputs": "JSON",
    "speculative": "JSON",
    "logits_processors": "MODULE:CLASS",
    "lora_modules": "NAME=PATH",
    "other_models": "NAME=PATH",
}
# vLLM's options that Baton lacks, and options of other commands: what to do instead. See `instead_of`.
INSTEAD: Final = {
    "--model": "the model comes first and has no flag: baton COMMAND MODEL",
    "--prompt": "the prompt has no flag: baton generate MODEL PROMPT",
    "--api-key": "keys belong to tenants: `baton keys add NAME` makes a file of them, give --tenants FILE",
    "--enable-auto-tool-choice": "the chat template decides whether tools can be called; leave it out",
    "--tool-parser-plugin": "a parser of your own is a class in Baton's registry: see docs/extending.md",
    "--reasoning-parser-plugin": "a parser of your own is a class in Baton's registry: see docs/extending.md",
    "--enable-reasoning": "the chat template decides whether there is reasoning, or --reasoning-parser",
    "--chat-template-content-format": "the parts of a message become one text; leave it out",
    "--kv-transfer-config": "prefill and decode workers find each other; leave it out, or give --transport",
    "--kv-events-config": "workers send their KV events to the routers; leave it out",
    "--node-rank": "Ray starts the ranks of --nnodes on its nodes; leave it out",
    "--master-addr": "Ray starts the ranks of --nnodes on its nodes; leave it out",
    "--master-port": "Ray starts the ranks of --nnodes on its nodes; leave it out",
    "--scheduling-policy": "requests are served in their order; --scheduler-policy is about batches",
    "--tokenizer": "the tokenizer is read from the model's directory; leave it out",
    "--tokenizer-mode": "the tokenizer is read from the model's directory; leave it out",
    "--config-format": "config.json is read from the model's directory; leave it out",
    "--revision": "the revision of a repository follows its name: ORGANIZATION/NAME@REVISION",
    "--trust-remote-code": "no code of a model is ever run; leave it out",
    "--model-impl": "the code of every model is Baton's own; leave it out",
    "--task": "Baton generates text, and has no other task; leave it out",
    "--runner": "Baton generates text, and has no other task; leave it out",
    "--limit-mm-per-prompt": "Baton serves text alone; leave it out",
    "--shutdown-timeout": "give --drain-timeout",
    "--distributed-executor-backend": "give --runtime ray or --runtime local",
    "--data-parallel-": "give --prefill N and --decode N, the workers of each role",
    "-dp": "give --prefill N and --decode N, the workers of each role",
    "--api-server-count": "give --gateways",
    "-asc": "give --gateways",
    "--swap-space": "give --host-cache-memory, the host memory of KV pages",
    "--kv-offloading-size": "give --host-cache-memory, the host memory of KV pages",
    "--num-gpu-blocks-override": "give --kv-cache-memory",
    "--cpu-offload-gb": "weights stay on the device; leave it out",
    "--enable-chunked-prefill": "long prompts are always computed in chunks; leave it out",
    "--enable-eplb": "experts stay on their ranks; leave it out",
    "--enable-sleep-mode": "every model can sleep; leave it out",
    "--enable-prompt-tokens-details": "usage always has the cached tokens; leave it out",
    "--enable-request-id-headers": "every answer has the header x-request-id; leave it out",
    "--enable-server-load-tracking": "/load always shows the load; leave it out",
    "--enable-log-requests": "no request is logged; `baton explain` shows what became of one",
    "--disable-log-requests": "no request is logged; leave it out",
    "--disable-log-stats": "no statistics are logged, /metrics has them; leave it out",
    "--max-log-len": "no request is logged; leave it out",
    "--uvicorn-log-level": "set BATON_LOG_LEVEL",
    "--ssl-keyfile": "a proxy in front ends TLS: see docs/operations.md",
    "--ssl-certfile": "a proxy in front ends TLS: see docs/operations.md",
    "--root-path": "a proxy in front takes a prefix off: see docs/operations.md",
    "--middleware": "a proxy in front can change requests: see docs/operations.md",
    "--allowed-methods": "--allowed-origins allows every method; leave it out",
    "--allowed-headers": "--allowed-origins allows every header; leave it out",
    "--uds": "give --host and --port",
    "--hf-overrides": "change config.json in the model's directory",
    "--hf-token": "set HF_TOKEN",
    "--rope-scaling": "change config.json in the model's directory",
    "--download-dir": "set HF_HOME",
    "--max-logprobs": "a request may ask for 20; leave it out",
    "--guided-decoding-backend": "llguidance keeps all structured outputs; leave it out",
    "--structured-outputs-config": "llguidance keeps all structured outputs; leave it out",
    "--compilation-config": "nothing is compiled by torch; leave it out",
    "-cc": "nothing is compiled by torch; leave it out",
    "-O": "nothing is compiled by torch; leave it out",
    "--attention-backend": "the kernels are Baton's own; leave it out",
    "--disable-custom-all-reduce": "it changes nothing here; leave it out",
    "--enforce-eager": "on a GPU, CUDA graphs are always used; leave it out",
    "--max-seq-len-to-capture": "on a GPU, CUDA graphs are always used; leave it out",
}
MIN_LIKENESS: Final = 0.8  # of an unknown option and the known one that an error suggests

Read: TypeAlias = Callable[[str], object]
CHECKPOINT_FORMATS: Final = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4")
# vLLM's values of --load-format that Baton lacks: what to do instead.
LOAD_FORMATS: Final = {
    "mistral": "a model is a directory in Hugging Face layout: give one with config.json and tokenizer.json",
    "runai_streamer": "safetensors are read from a directory: copy them there, and leave this out",
}
COUNT_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def integers(text: str) -> tuple[int, ...]:
    """Read "5,17"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"expected integers such as 5,17, got {text!r}") from None


def biases(text: str) -> dict[int, float]:
    """Read "5:-1.5,17:2": token ids and the biases of their logits."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise ArgumentTypeError(f"expected biases such as 5:-1.5,17:2, got {text!r}") from None


def origins(text: str) -> tuple[str, ...]:
    """Read '["https://a.example"]' as vLLM does, or "https://a.example,https://b.example"."""
    if not text.startswith("["):
        return tuple(part.strip() for part in text.split(","))
    try:
        return tuple(msgspec.json.decode(text, type=list[str]))
    except msgspec.MsgspecError:
        raise ArgumentTypeError(f"expected a JSON list of sites, got {text!r}") from None


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between them."""
    return tuple(text.split(","))


def count(text: str) -> int:
    """Read an integer as vLLM does: 4k is 4,000 and 4K is 4,096."""
    match = re.fullmatch(r"(\d{1,19})(\.\d{1,9})?([kmgKMG]?)", text)
    if match is None or (match[2] and match[3] not in ("k", "m", "g")):
        raise ArgumentTypeError(f"expected an integer such as 4096, 4k (4000) or 4K (4096), got {text!r}")
    unit = COUNT_UNITS[match[3]]
    return int(match[1]) * unit + round(float(match[2] or 0) * unit)


def quantization(text: str) -> str:
    """Refuse the formats of quantised checkpoints, which vLLM's option names too."""
    if text in CHECKPOINT_FORMATS:
        raise ArgumentTypeError(f"a checkpoint in {text} is recognised by its config.json; leave this out")
    return text


def load_format(text: str) -> str:
    """Read "safetensors" as "auto", and refuse other formats of vLLM."""
    if text in LOAD_FORMATS:
        raise ArgumentTypeError(LOAD_FORMATS[text])
    return "auto" if text == "safetensors" else text


def routing_policy(text: str) -> str:
    """Check the name of a routing policy, or package.module:Class of one that can be imported."""
    from baton.router.policies.registry import policy_class  # numpy: --help does not wait for it

    try:
        policy_class(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error).removeprefix("router.policy: ")) from error
    return text


# A setting's key -> how to read its option, where an environment variable would be read differently.
READERS: Final[Mapping[str, Read]] = {
    "policy": routing_policy,
    "router.policy": routing_policy,
    "allowed_origins": origins,
    "gateway.allowed_origins": origins,
    "engine.dtype": lambda text: {"half": "float16", "float": "float32"}.get(text, text),  # vLLM's names
    "engine.quantization": quantization,
    "engine.load_format": load_format,
    "engine.cache.kv_cache_dtype": lambda text: {"fp8_e4m3": "fp8"}.get(text, text),  # vLLM's name
    "engine.max_model_len": count,
    "engine.scheduler.max_num_batched_tokens": count,
    "engine.scheduler.preferred_batch_sizes": integers,
    "engine.logits_processors": names,
    "other_models": str,
    "lora_modules": names,
    "gateway.lora_modules": names,
    "sampling.stop_token_ids": integers,
    "sampling.allowed_token_ids": integers,
    "sampling.logit_bias": biases,
}


def instead_of(flag: str) -> str | None:
    """Return what to do instead of an option of vLLM that Baton lacks; None for any other option.

    --no-X stands for X, and a key of INSTEAD that ends with a dash for all options that it begins.
    """
    name = f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else flag
    if re.fullmatch(r"-O\d", name):  # vLLM's levels of optimisation
        name = "-O"
    begun = (key for key in INSTEAD if key.endswith("-") and name.startswith(key))
    return INSTEAD.get(next(begun, name))


class Setting(NamedTuple):
    """One field of a settings struct that an option sets."""

    key: str  # of the parsed arguments: the prefix of its struct, and the field's dotted key
    field: msgspec.structs.FieldInfo
    owner: type[msgspec.Struct]

    @property
    def is_switch(self) -> bool:
        """The option is a flag without a value."""
        return _plain(self.field.type) is bool

    @property
    def flags(self) -> list[str]:
        """The names of the option: for a boolean, also its negation."""
        owner = self.key.partition(".")[0]
        name = f"{owner}-{self.field.name}" if owner in PREFIXED else self.field.name
        default = "--" + name.removesuffix("_s").replace("_", "-")
        flags = FLAGS.get(self.key, default).split()
        return [*flags, *(f"--no-{flag[2:]}" for flag in flags if self.is_switch)]

    @property
    def metavar(self) -> str | None:
        """The placeholder of the value in the help; None for a flag without a value."""
        kind = _plain(self.field.type)
        if get_origin(kind) is Literal:
            return f"{{{','.join(get_args(kind))}}}"
        of_type = {int: "N", float: "S" if self.field.name.endswith("_s") else "X", bool: None}
        if self.field.name in METAVARS or self.field.name.endswith("_bytes"):
            return METAVARS.get(self.field.name, "SIZE")
        return of_type.get(kind, "NAME")

    def help(self) -> str:
        """Return the setting's comment and its default. Reads the source of the struct."""
        default = self.field.default
        is_shown = default not in (None, msgspec.NODEFAULT, (), "") and not isinstance(default, Mapping)
        comment = comments(self.owner).get(self.field.name, "")
        role = self.key.partition(".")[0]
        text = f"{role}: {comment}" if role in ("prefill", "decode") else comment
        text = text.replace("%", "%%").replace("None:", "by default:")
        return f"{text} (default: {default})" if is_shown else text

    def read(self, text: str) -> object:
        """Return the option's value. Raises ArgumentTypeError for text that is no value."""
        try:
            return READERS[self.key](text) if self.key in READERS else from_text(self.field, text, self.key)
        except ConfigError as error:
            raise ArgumentTypeError(str(error).removeprefix(f"{self.key}: ")) from None


def settings_of(struct_type: type[msgspec.Struct], prefix: str = "") -> dict[str, Setting]:
    """Return key -> setting of every leaf of a struct; keys begin with `prefix`."""
    found = {}
    for key, field in leaves(struct_type).items():
        owner = struct_type
        for part in key.split(".")[:-1]:
            (owner,) = (each.type for each in msgspec.structs.fields(owner) if each.name == part)
        found[prefix + key] = Setting(prefix + key, field, owner)
    return found


class _Store(argparse.Action):
    """Stores the setting's value under its key, and the flag as it was typed in `Parser.spelled`."""

    setting: Setting

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        value = not flag.startswith("--no-") if self.nargs == 0 else values
        _set(namespace, self.dest, value, flag)


def _set(namespace: argparse.Namespace, key: str, value: object, flag: str) -> None:
    setattr(namespace, key, value)
    setattr(namespace, SPELLED, {**getattr(namespace, SPELLED, {}), key: flag})


class _AddModel(_Store):
    """Stores --model, which is given once a model: the first is `model`, the others are `other_models`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        name, equals, path = str(values).partition("=")
        if not equals or "/" in name:  # a path may have "=" in it
            name, path = "", str(values)
        flag, others = option_string or self.option_strings[0], getattr(namespace, self.dest, {})
        if getattr(namespace, "model", None) is None:
            _set(namespace, "model", path, flag)
            if name:
                _set(namespace, "served_model_name", name, flag)
        elif name and name not in others:
            _set(namespace, self.dest, {**others, name: {"model": path}}, flag)
        else:
            raise argparse.ArgumentError(self, f"expected NAME=PATH with a name of its own, got {values!r}")


SPELLED: Final = "spelled"  # of the parsed arguments: key -> the flag that was typed


class Parser(argparse.ArgumentParser):
    """A parser of one command: every error is one line, and an unknown option names the nearest known one."""

    def __init__(self, command: str, description: str | None) -> None:
        super().__init__(
            prog=f"baton {command}".strip(),
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_settings(self, title: str, settings: Iterable[Setting]) -> None:
        """Add an option for each of these settings, in a group of this title.

        A flag that an earlier setting has, such as --seed of `baton generate`, stays with that setting.
        """
        group = self.add_argument_group(title)
        for setting in settings:
            action = group.add_argument(
                *(flag for flag in setting.flags if flag not in self._option_string_actions),
                dest=setting.key,
                action=_AddModel if setting.key == "other_models" else _Store,
                type=str if setting.is_switch else setting.read,
                nargs=0 if setting.is_switch else None,
                metavar=setting.metavar,
                default=argparse.SUPPRESS,
            )
            assert isinstance(action, _Store)
            action.setting = setting

    def format_help(self) -> str:
        """Fill in the help of the settings, which is read from source only here, and format the help."""
        for action in self._actions:
            if isinstance(action, _Store):
                action.help = action.setting.help()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """End the process with status 2, without the usage, which would hide the message."""
        text = message.removeprefix("argument ")
        self.exit(USER_ERROR, f"baton: error: {text} (see {self.prog} --help)\n")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`; the last positional argument may also follow the options."""
        arguments, unknown = self.parse_known_args(argv)
        self._take_late_positional(argv, arguments, unknown)
        if unknown:
            is_text = not unknown[0].startswith("-")
            self.error(self._unexpected(unknown[0], argv) if is_text else self._unknown(unknown[0]))
        return arguments

    def _take_late_positional(
        self, argv: Sequence[str], arguments: argparse.Namespace, unknown: list[str]
    ) -> None:
        """Move an optional positional out of `unknown`: argparse finds none after an option."""
        literal = list(argv)[argv.index("--") + 1 :] if "--" in argv else []
        if unknown[:1] == ["--"]:
            del unknown[0]
        for action in self._actions:
            is_empty = not action.option_strings and getattr(arguments, action.dest, None) is None
            is_text = bool(unknown) and (unknown[0] in literal or not unknown[0].startswith("-"))
            if is_empty and is_text and action.nargs == argparse.OPTIONAL:
                setattr(arguments, action.dest, unknown.pop(0))

    def _unexpected(self, argument: str, argv: Sequence[str]) -> str:
        """Return the error for a text that no option takes, such as the second value of an option."""
        index = list(argv).index(argument)
        flag, value = argv[index - 2 : index] if index >= 2 else ("", "")
        action = self._option_string_actions.get(flag)
        if not isinstance(action, _Store) or action.nargs == 0:
            return f"unexpected argument {argument!r}: put a text of several words in quotes"
        if READERS.get(action.setting.key) in (names, integers, origins):
            return f"{flag}: put commas between several values: {flag} {value},{argument}"
        return f"{flag} takes one value: unexpected argument {argument!r}"

    def _unknown(self, argument: str) -> str:
        flag = argument.partition("=")[0]
        instead = instead_of(flag)
        if instead is not None:
            return f"unknown option {flag!r}: {instead.replace('baton COMMAND', self.prog)}"
        flags = list(self._option_string_actions)
        begun = [known for known in flags if len(flag) > 2 and known.startswith(flag)]
        nearest = (
            begun if len(begun) == 1 else difflib.get_close_matches(flag, flags, n=1, cutoff=MIN_LIKENESS)
        )
        if nearest:
            return f"unknown option {argument!r}; did you mean {nearest[0]}?"
        if flag.startswith("--"):
            return f"unknown option {flag!r}"
        return f"unknown option {argument!r}; put -- before a text that starts with a dash"


def in_flags(message: str, settings: Iterable[Setting], arguments: argparse.Namespace) -> str:
    """Replace the names of settings in an error message by their flags.

    A dotted name, such as cache.page_size, is replaced anywhere; other names only at the start.
    """
    spelled = getattr(arguments, SPELLED, {})
    for setting in settings:
        name = setting.key.partition(".")[2]
        pattern = rf"\b{re.escape(name)}\b" if "." in name else rf"^{name}\b"
        message = re.sub(pattern, spelled.get(setting.key, setting.flags[0]), message)
    return message


class CliCommand(NamedTuple):
    """One command of `baton`, which a module of cli/commands defines under the command's name."""

    description: str | None
    add_options: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int | None]  # returns the exit status; None is 0


def _plain(kind: Any) -> Any:
    """Return a field's type without its bounds and without None."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return _plain(next(part for part in get_args(kind) if part is not type(None)))
    return kind
