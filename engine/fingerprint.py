"""A model's fingerprint: part of every KV page's identity, so that pages are shared within one model only."""

import hashlib
from pathlib import Path
from typing import Final

from baton.engine.checkpoint_files import weight_files
from baton.engine.safetensors_file import SafetensorsHeader, read_safetensors_header

DIGEST_BYTES: Final = 16
SAMPLE_BYTES: Final = 4096  # of each tensor


def fingerprint(directory: Path, *, dummy_seed: int | None = None) -> str:
    """BLAKE2b-128, in hexadecimal, of config.json and every weight file's size, header and samples.

    A sample, up to 4 KiB from the middle of each tensor, tells a fine-tuned model from its base, which
    has the same headers: training changes values all over a tensor. Every byte is not hashed: at the 1 to
    2 GB/s of a disk, 140 GB of weights would take a minute or two at each start of each worker. Two models
    that differ only outside the samples share a fingerprint, and with it cached pages: such a pair is made by
    hand, by somebody who owns both. With `dummy_seed` the weights are what that seed makes of config.json.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"baton model")
    _update(digest, (directory / "config.json").read_bytes())
    if dummy_seed is not None:
        _update(digest, f"dummy weights {dummy_seed}".encode())
        return digest.hexdigest()
    for path in weight_files(directory):
        header = read_safetensors_header(path)
        _update(digest, path.name.encode())
        _update(digest, header.raw)
        for sample in _samples(path, header):
            _update(digest, sample)
    return digest.hexdigest()


def _samples(path: Path, header: SafetensorsHeader) -> list[bytes]:
    samples = []
    with path.open("rb") as file:
        for entry in header.tensors.values():
            taken = min(SAMPLE_BYTES, entry.num_bytes)
            file.seek(header.data_start + entry.data_offsets[0] + (entry.num_bytes - taken) // 2)
            samples.append(file.read(taken))
    return samples


def _update(digest: "hashlib.blake2b", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))  # parts cannot run into each other
    digest.update(part)
