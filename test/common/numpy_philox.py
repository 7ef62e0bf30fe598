"""torch's CUDA generator in NumPy: Philox4x32-10, and the loops of torch's kernels as their sources write them.

Threads go through their elements here; the kernel of the package goes from an element to its thread. ``torch_ragged`` is not
imported.
"""

import numpy as np

BLOCK = 256


def philox4x32(counter, key):
    """The four words of a call. ``counter`` has four arrays of uint32, ``key`` two numbers."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        one, two = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
        c0, c1, c2, c3 = (two >> high) ^ c1 ^ np.uint64(k0), two & low, (one >> high) ^ c3 ^ np.uint64(k1), one & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


class Thread:
    """All threads of a grid at once: ``curand_init(seed, thread, offset)``, and a call after the other."""

    def __init__(self, seed, threads, offset):
        assert offset % 4 == 0
        self.key, self.threads, self.counter = (seed % 2**32, seed // 2**32 % 2**32), np.arange(threads), offset // 4

    def curand4(self):
        low, high = self.counter % 2**32, self.counter // 2**32 % 2**32
        self.counter += 1
        zeros = np.zeros(len(self.threads), np.uint32)
        return philox4x32((zeros + np.uint32(low), zeros + np.uint32(high), self.threads, zeros), self.key)


def threads_of(numel, most):
    """The threads that draw: one per element in whole blocks, and no more than the device holds."""
    return BLOCK * min(-(-numel // BLOCK), most // BLOCK)


def drawn(numbers, lanes, numel, most, seed, offset):
    """The elements of a draw, and the offset after it. ``numbers`` makes ``lanes`` arrays of four words."""
    threads, calls = threads_of(numel, most), 0
    state, result = Thread(seed, threads, offset), None
    linear = np.arange(threads)
    while linear[0] < numel:
        found = numbers(*state.curand4())
        result = np.zeros(numel, found[0].dtype) if result is None else result
        for lane in range(lanes):
            place = linear + threads * lane
            result[place[place < numel]] = found[lane][place < numel]
        linear, calls = linear + threads * lanes, calls + 1
    return result, offset + 4 * calls


def kept(p, numel, most, seed, offset, vector, dtype=np.float32):
    """The mask of native_dropout, whose threads take ``vector`` elements at once, and the offset after it."""
    if vector == 1:
        return drawn(lambda *words: [uniform(word) < dtype(1 - p) for word in words], 4, numel, most, seed, offset)
    threads, result = threads_of(numel, most), np.zeros(numel, bool)
    state, linear = Thread(seed, threads, offset), np.arange(threads) * vector
    while linear[0] < numel:
        words = [word for _ in range(-(-vector // 4)) for word in state.curand4()]
        for neighbour in range(vector):
            inside = linear < numel
            result[linear[inside] + neighbour] = (uniform(words[neighbour]) < dtype(1 - p))[inside]
        linear = linear + threads * vector
    return result, offset + 4 * -(-numel // (threads * 4))


# --- numbers of words ---------------------------------------------------------------------------------------------------


def uniform(word):
    """CURAND's float in (0, 1]. Sums and products are exact in float64, and are rounded once."""
    return (word.astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33).astype(np.float32)


def uniforms(*words):
    return [uniform(word) for word in words]


def wide(x, y):
    return (x.astype(np.uint64) ^ (y.astype(np.uint64) << np.uint64(21))).astype(np.float64)


def uniforms_64(a, b, c, d):
    return [wide(x, y) * 2.0**-53 + 2.0**-54 for x, y in ((a, b), (c, d))]


def normals(a, b, c, d):
    """By Box and Muller, in float64 from angles and logarithms of float32."""
    result, scale = [], np.float64(np.float32(2.0**-32) * np.float32(6.2831855))
    for x, y in ((a, b), (c, d)):
        angle = (y.astype(np.float32).astype(np.float64) * scale + scale / 2).astype(np.float32).astype(np.float64)
        size = np.sqrt(-2 * np.log(uniform(x).astype(np.float64)))
        result += [size * np.sin(angle), size * np.cos(angle)]
    return result


def normals_64(a, b, c, d):
    angle, size = np.pi * (wide(c, d) * 2.0**-52 + 2.0**-53), np.sqrt(-2 * np.log(wide(a, b) * 2.0**-53 + 2.0**-54))
    return [size * np.sin(angle), size * np.cos(angle)]


def integers(*words):
    return [word.astype(np.uint64) for word in words]


def integers_64(a, b, c, d):
    return [(x.astype(np.uint64) << np.uint64(32)) | y.astype(np.uint64) for x, y in ((a, b), (c, d))]
