"""What a worker tells about its checkpoint besides the model itself; needs no torch."""

import hashlib
import struct
from pathlib import Path

from tokenizers import Tokenizer

from services.worker.loading.files import open_regular
from shared.errors import CheckpointError

_HEADER_SIZE_BYTES = 8


def model_digest(path: Path) -> str:
    """SHA-256 over config.json and the headers of all weight files, in hex.

    A header lists name, type, shape and place of every tensor. The weights themselves are not read:
    a digest of hundreds of GiB would take longer than loading them.
    """
    digest = hashlib.sha256()
    try:
        digest.update((path / "config.json").read_bytes())
        for file in sorted(path.glob("*.safetensors")):
            digest.update(file.name.encode())
            digest.update(_header(file))
    except (OSError, struct.error) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return digest.hexdigest()


def _header(file: Path) -> bytes:
    descriptor, _ = open_regular(file)
    with open(descriptor, "rb") as stream:
        size = stream.read(_HEADER_SIZE_BYTES)
        return stream.read(min(struct.unpack("<Q", size)[0], file.stat().st_size))


def num_known_ids(path: Path, vocab_size: int) -> int:
    """Ids that the tokenizer knows; those behind them are padding of the embedding.

    Without a tokenizer.json every id counts as known.

    Raises:
        CheckpointError: The tokenizer knows ids that the model does not have.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        return vocab_size
    try:
        vocab = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    known = 1 + max(vocab.values(), default=-1)
    if not 0 < known <= vocab_size:
        raise CheckpointError(f"{file}: has {known} ids, the model has {vocab_size}")
    return known
