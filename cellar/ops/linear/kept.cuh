// One token that keeps its bits on its way into a product (KEPT of them a number), for kernels whose warps share rows and
// take turns along k. With 16 it becomes float16 times a power of two, beside it the sums of what a zero point meets; with
// 24 a whole number of three bytes, each byte a token for the tensor cores.
//
// Each warp brings the columns that it multiplies, with a power of two of their own, so that no warp waits for another but
// for the squares of a norm; those of a cluster's other blocks lie here behind a norm alone. That power is at most 2^126: tokens below 2^-105 throughout lose bits. Behind `alone.cuh`.

constexpr int SPREAD = 64;  // columns of a warp's load, two a lane
constexpr u32 SCRATCH_BYTES = SCRATCH * 4;
constexpr int TOP = KEPT == 16 ? 14 : 21;  // the largest number lies between 2^TOP and twice that

// TURN: columns that a warp takes at a time.
template <int TURN>
struct Turns {
    static constexpr int ALL = (K + TURN - 1) / TURN;
    static constexpr int OWN = (ALL + WARPS * CLUSTER - 1) / (WARPS * CLUSTER);
    static constexpr int HELD = NORMED ? OWN * CLUSTER : OWN;  // the squares are those of all columns
    static constexpr int PAIRS = TURN / SPREAD;
    static constexpr int STEP = NORMED ? WARPS : WARPS * CLUSTER;
    static constexpr int PLACES = HELD * WARPS;  // of turns, in shared memory
    static constexpr u32 PADDED = PLACES * TURN;
};

// Where a warp's i-th turn lies in shared memory, which is its number where all are here.
__device__ __forceinline__ int place_of(int i) { return threadIdx.x / 32 + i * WARPS; }

// Two neighbouring columns of each 64 of a turn, zeros beyond the last.
template <int TURN>
__device__ __forceinline__ void load_pairs(
    const u16* from, int first, u32 (&x)[Turns<TURN>::HELD][Turns<TURN>::PAIRS]) {
#pragma unroll
    for (int i = 0; i < Turns<TURN>::HELD; ++i) {
#pragma unroll
        for (int j = 0; j < Turns<TURN>::PAIRS; ++j) {
            const int at = (first + i * Turns<TURN>::STEP) * TURN + j * SPREAD + threadIdx.x % 32 * 2;
            x[i][j] = K % (TURN * WARPS * CLUSTER) == 0 || at < K ? *reinterpret_cast<const u32*>(from + at) : 0;
        }
    }
}

// RMSNorm of residual and delta, each step rounded; their sum is written once.
template <int TURN>
__device__ __forceinline__ void add_and_norm_pairs(
    const Given& given, int first, u32 (&x)[Turns<TURN>::HELD][Turns<TURN>::PAIRS],
    const u32 (&gain)[Turns<TURN>::HELD][Turns<TURN>::PAIRS], float* scratch) {
    u32 delta[Turns<TURN>::HELD][Turns<TURN>::PAIRS];
    if (given.delta) load_pairs<TURN>(given.delta, first, delta);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < Turns<TURN>::HELD; ++i) {
#pragma unroll
        for (int j = 0; j < Turns<TURN>::PAIRS; ++j) {
            u32& pair = x[i][j];
            if (given.delta) {
                pair = two(low_of(pair) + low_of(delta[i][j]), high_of(pair) + high_of(delta[i][j]));
                const int at = (first + i * Turns<TURN>::STEP) * TURN + j * SPREAD + threadIdx.x % 32 * 2;
                if (blockIdx.x == 0 && at < K) *reinterpret_cast<u32*>(given.total + at) = pair;
            }
            squares += low_of(pair) * low_of(pair) + high_of(pair) * high_of(pair);
        }
    }
    const float by = 1.0f / sqrtf(sum_of_block(squares, scratch) / K + given.eps);
#pragma unroll
    for (int i = 0; i < Turns<TURN>::HELD; ++i) {
#pragma unroll
        for (int j = 0; j < Turns<TURN>::PAIRS; ++j) {
            x[i][j] = multiply_two(two(low_of(x[i][j]) * by, high_of(x[i][j]) * by), gain[i][j]);
        }
    }
}

#if KEPT == 16
// Numbers of LANES lanes added up, several at once: each lane ends with the sum of one, x[0], whose number is returned. In each
// step a lane gives half of its numbers away, for the other lane's share of those that it keeps.
template <int LANES, int COUNT>
__device__ __forceinline__ int added_across(float (&x)[COUNT]) {
    int number = 0, left = COUNT;
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2) {
        if (left > 1) {
            left /= 2;
            const bool upper = threadIdx.x & distance;
            number += upper ? left : 0;
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) {
                if (i >= left) break;
                const float given = upper ? x[i] : x[i + left];
                x[i] = (upper ? x[i + left] : x[i]) + __shfl_xor_sync(~0u, given, distance);
            }
        } else {
            x[0] += __shfl_xor_sync(~0u, x[0], distance);
        }
    }
    return number;
}

// A lane's columns of all turns in float16 to shared memory, and to `sums` what a zero point meets: the sums of the columns
// that share one, but of a turn's at most.
template <int TURN>
__device__ __forceinline__ void store_halves(
    u32 to, u32 sums, const u32 (&x)[Turns<TURN>::HELD][Turns<TURN>::PAIRS], float factor) {
    using Of = Turns<TURN>;
    constexpr int SUMMED = GROUP < TURN ? GROUP : TURN, OF_TURN = TURN / SUMMED;
    constexpr int EACH = SUMMED > SPREAD ? SUMMED / SPREAD : 1, KINDS = Of::PAIRS / EACH;  // pairs that one sum has
    constexpr int LANES = SUMMED < SPREAD ? SUMMED / 2 : 32;                               // that have columns of it
    const int lane = threadIdx.x % 32;
    float sum[Of::HELD][KINDS];
#pragma unroll
    for (int i = 0; i < Of::HELD; ++i) {
#pragma unroll
        for (int j = 0; j < Of::PAIRS; ++j) {
            const float low = low_of(x[i][j]) * factor, high = high_of(x[i][j]) * factor;
            store_shared(to + (place_of(i) * TURN + j * SPREAD + lane * 2) * 2, two_halves(low, high));
            sum[i][j / EACH] = (j % EACH ? sum[i][j / EACH] : 0.0f) + (low + high);
        }
    }
    constexpr int ALL = Of::HELD * KINDS, EACH_TIME = ALL > 8 ? 16 : ALL > 4 ? 8 : 4;
#pragma unroll
    for (int begin = 0; begin < ALL; begin += EACH_TIME) {
        float some[EACH_TIME];
#pragma unroll
        for (int i = 0; i < EACH_TIME; ++i) some[i] = begin + i < ALL ? sum[(begin + i) / KINDS][(begin + i) % KINDS] : 0.0f;
        const int which = begin + added_across<LANES>(some);
        const int place = place_of(which / KINDS) * OF_TURN + which % KINDS * (32 / LANES) + lane / LANES;
        if (which < ALL) store_shared(sums + place * 4, __float_as_uint(some[0]));
    }
}
#else
// Four columns in three bytes each to shared memory, in the order of `quant/packed.py`: between neighbours lies the column
// 64 behind.
__device__ __forceinline__ void store_bytes(u32 to, u32 padded, const u32 (&pairs)[2], float factor) {
    int whole[4] = {nearest(low_of(pairs[0]) * factor), nearest(low_of(pairs[1]) * factor),
                    nearest(high_of(pairs[0]) * factor), nearest(high_of(pairs[1]) * factor)};
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            word |= (whole[i] & 255u) << 8 * i;
            whole[i] = (whole[i] + 128) >> 8;  // bytes have signs
        }
        store_shared(to + plane * padded + threadIdx.x % 32 * 4, word);
    }
}
#endif

// The token's columns of this warp to `to` in shared memory, of float16 their sums to `sums`; what they are to be
// multiplied by afterwards is returned. Waits for the kernel in front. taker: the warp among those of the cluster.
template <int TURN>
__device__ __forceinline__ float keep(const Given& given, u32 to, u32 sums, float* scratch, int taker) {
    using Of = Turns<TURN>;
    const int first = NORMED ? threadIdx.x / 32 : taker;
    u32 x[Of::HELD][Of::PAIRS], gain[Of::HELD][Of::PAIRS];
    if constexpr (NORMED) load_pairs<TURN>(given.norm, first, gain);
    wait_for_kernel_in_front();
    let_next_kernel_start();
    load_pairs<TURN>(given.x, first, x);
    if constexpr (NORMED) add_and_norm_pairs<TURN>(given, first, x, gain, scratch);
    u32 most = 0;  // of both columns, as bits: numbers that are none are larger than all others
#pragma unroll
    for (int i = 0; i < Of::HELD; ++i) {
#pragma unroll
        for (int j = 0; j < Of::PAIRS; ++j) most = larger_two(most, x[i][j] & 0x7fff7fff);
    }
    most = most_in_warp(most >> 16 > (most & 0xffff) ? most >> 16 : most & 0xffff);
    const int exponent = __float_as_uint(one(static_cast<u16>(most))) >> 23;  // 255: a number that is none, or has no end
    const int up = 254 + TOP - exponent < 253 ? 254 + TOP - exponent : 253;
    const float factor = __uint_as_float(static_cast<u32>(up) << 23);
#if KEPT == 16
    store_halves<TURN>(to, sums, x, factor);
#else
#pragma unroll
    for (int i = 0; i < Of::HELD; ++i) store_bytes(to + place_of(i) * TURN, Of::PADDED, x[i], factor);
#endif
    __syncwarp();
    return __uint_as_float(exponent == 255 ? 0x7fc00000 : static_cast<u32>(254 - up) << 23);
}
