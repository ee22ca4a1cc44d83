"""Names of full KV blocks: a hash of all tokens up to the end of the block, and of what they mean.

    root    = SHA-256(text), text = "glm-mesh.prefix.1" NUL block size NUL model digest NUL salt
    hash[i] = SHA-256(hash[i - 1] or root, then the ids of block i as little-endian uint32)

So equal hashes mean equal tokens from the first one on, the same model and the same salt. The rule
is part of the contract: whoever follows the events of a cache can name the blocks of a prompt.
"""

from array import array
from hashlib import sha256
from typing import Final

HASH_BYTES: Final = 32
_VERSION: Final = "glm-mesh.prefix.1"


def root_hash(model_digest: str, block_size: int, cache_salt: str) -> bytes:
    """What the first block of every chain of this model and salt continues."""
    text = "\0".join((_VERSION, str(block_size), model_digest, cache_salt))
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


class BlockHashes:
    """The hashes of one sequence, as many as were asked for; its tokens only ever grow.

    Args:
        root: Of its model and salt.
        block_size: Tokens of a block.
    """

    __slots__ = ("block_size", "known", "root")

    def __init__(self, root: bytes, block_size: int) -> None:
        """No block is hashed yet."""
        self.root = root
        self.block_size = block_size
        self.known: list[bytes] = []

    def extend(self, num_blocks: int, prompt: "array[int]", output: "array[int]") -> None:
        """Hash the first `num_blocks` blocks, which are full; known ones are not hashed again."""
        known, size = self.known, self.block_size
        if num_blocks <= len(known):
            return
        assert num_blocks * size <= len(prompt) + len(output), "a block that is not full"
        num_in_prompt = min(num_blocks, len(prompt) // size)
        if len(known) < num_in_prompt:
            self._add(memoryview(prompt)[len(known) * size : num_in_prompt * size])
        if num_blocks > num_in_prompt:
            first, last = len(known) * size, num_blocks * size
            start = max(0, first - len(prompt))
            # Copied: a view would forbid the output to grow.
            self._add(memoryview(prompt[first:] + output[start : last - len(prompt)]))

    def _add(self, tokens: "memoryview[int]") -> None:
        data, known = tokens.cast("B"), self.known
        name = known[-1] if known else self.root
        for start in range(0, len(data), 4 * self.block_size):
            state = sha256(name)
            state.update(data[start : start + 4 * self.block_size])
            name = state.digest()
            known.append(name)
