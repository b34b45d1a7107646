"""The two families of tokenizers that the supported models use, trained on a page of text."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "déjà vu, naïve café, Zürich, smörgåsbord",
    "日本語のテキスト、日本の首都は東京です",
    "emoji 😀😁😂 and flags 🇫🇷🇯🇵, family 👨‍👩‍👧",
    "  leading and   inner spaces\nand lines\n",
]
SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    """Return a tokenizer like those of Llama 3 and Qwen: every token is a run of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral: characters, and bytes for unknown ones."""
    names = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = sorted(set("".join(TEXT[:2])) - {" "})
    vocabulary = {name: index for index, name in enumerate([*names, *letters])}
    merges = []
    for pair in [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("a", "g")]:
        vocabulary["".join(pair)] = len(vocabulary)
        merges.append(pair)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer
