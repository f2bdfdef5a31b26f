// What one token goes through on its way into a product, in each block by itself: residual add and RMSNorm (NORMED), then
// rounding to 8 bits (ROUNDED; to int8 if WHOLE, else e4m3), or a form that keeps its bits (KEPT, `kept.cuh`). It lies in
// shared memory then. And what may stand behind a product, a gate (GATED). Behind `tile.cuh`.
//
// The matrix is on its way meanwhile: what takes a launch of its own, with its beginning and its end, takes each block as
// long as it takes memory to answer.

constexpr bool ALONE = ROUNDED || KEPT;
constexpr int THREADS = WARPS * 32;
constexpr int HELD = (K / 8 + THREADS - 1) / THREADS;  // eights of columns of a thread
constexpr u32 PARTS_BYTES = WARPS * TOKENS * PITCH * 4;  // sums of all warps; the token lies behind
constexpr int SCRATCH = 32;                              // words of it, for one exchange among warps

static_assert(!ALONE || (TOKENS == 8 && K % 8 == 0 && WARPS <= SCRATCH));
static_assert(ALONE || !NORMED);

struct Given {
    const u16 *x, *delta, *norm;  // delta: 0 for nothing to add
    u16* total;                   // x + delta
    float eps;
};

__device__ __forceinline__ float low_of(u32 pair) { return one(static_cast<u16>(pair)); }

__device__ __forceinline__ float high_of(u32 pair) { return one(static_cast<u16>(pair >> 16)); }

__device__ __forceinline__ float sum_of_block(float x, float* scratch) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float all = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) all += scratch[warp];
    return all;
}

__device__ __forceinline__ u32 most_of_block(u32 x, u32* scratch) {
    const u32 most = most_in_warp(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
    __syncthreads();
    u32 all = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) all = scratch[warp] > all ? scratch[warp] : all;
    return all;
}

// A thread's columns, all asked for at once; zeros beyond the last.
__device__ __forceinline__ void load_token(const u16* from, u32 (&x)[HELD][4]) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int at = (threadIdx.x + i * THREADS) * 8;
        x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0;
        if (at < K) load_global(from + at, x[i]);
    }
}

// RMSNorm of residual and delta, their sum written once.
__device__ __forceinline__ void add_and_norm(const Given& given, u32 (&x)[HELD][4], const u32 (&gain)[HELD][4], float* scratch) {
    if (given.delta) {
        u32 delta[HELD][4];
        load_token(given.delta, delta);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[i][j] = two(low_of(x[i][j]) + low_of(delta[i][j]), high_of(x[i][j]) + high_of(delta[i][j]));
            }
            const int at = (threadIdx.x + i * THREADS) * 8;
            if (blockIdx.x == 0 && at < K) store_global(given.total + at, x[i]);
        }
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            squares += low_of(x[i][j]) * low_of(x[i][j]) + high_of(x[i][j]) * high_of(x[i][j]);
        }
    }
    const float by = 1.0f / sqrtf(sum_of_block(squares, scratch) / K + given.eps);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 y = two(low_of(x[i][j]) * by, high_of(x[i][j]) * by);
            x[i][j] = two(low_of(y) * low_of(gain[i][j]), high_of(y) * high_of(gain[i][j]));
        }
    }
}

#if ROUNDED
// Two numbers to codes, as `quant/tokens.py` has them.
__device__ __forceinline__ u32 whole_of(float x) {  // in 2^23 and a half more a unit is the last bit
    const float inside = x < -128.0f ? -128.0f : x > 127.0f ? 127.0f : x;
    return __float_as_uint(inside + 12582912.0f) & 255;
}

__device__ __forceinline__ u32 codes_of(u32 pair, float scale) {
    const float low = divided(low_of(pair), scale), high = divided(high_of(pair), scale);
#if WHOLE
    return whole_of(low) | whole_of(high) << 8;
#else
    return two_codes(low, high);
#endif
}

// The token, rounded, to `to` in shared memory, for all threads; its scale is returned. Waits for the kernel in front.
__device__ __forceinline__ float prepare(const Given& given, u32 to, float* scratch) {
    u32 x[HELD][4], gain[HELD][4];
    if constexpr (NORMED) load_token(given.norm, gain);
    wait_for_kernel_in_front();
    let_next_kernel_start();
    load_token(given.x, x);
    if constexpr (NORMED) add_and_norm(given, x, gain, scratch);
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // As bits, numbers that are none are larger than all others.
            const u32 low = __float_as_uint(low_of(x[i][j])) & 0x7fffffff, high = __float_as_uint(high_of(x[i][j])) & 0x7fffffff;
            most = low > most ? low : most;
            most = high > most ? high : most;
        }
    }
    float scale = divided(__uint_as_float(most_of_block(most, reinterpret_cast<u32*>(scratch) + SCRATCH)), WHOLE ? 127.5f : 448.0f);
    scale = scale == 0.0f ? 1.0f : scale;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int at = (threadIdx.x + i * THREADS) * 8;
        if (at >= K) continue;
        store_shared(to + at, codes_of(x[i][0], scale) | codes_of(x[i][1], scale) << 16);
        store_shared(to + at + 4, codes_of(x[i][2], scale) | codes_of(x[i][3], scale) << 16);
    }
    __syncthreads();
    return scale;
}
#endif

// silu(gate) * up, each step rounded as it is where it has a launch of its own.
__device__ __forceinline__ u16 gated(float gate, float up) {
    const float g = one(narrow(gate));
    return narrow(one(narrow(g / (1.0f + __expf(-g)))) * one(narrow(up)));
}
