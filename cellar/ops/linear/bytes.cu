// Products of a few tokens in 8 bits by a matrix in 8 bits on Hopper: out[m, n] = x[m, k] w[n, k]^T, both with scales.
// Either both are e4m3, or both int8, whose sums are whole numbers: the same bits in any order. Or int8 by one token in 16
// bits, whose three bytes (`kept.cuh`) are as three tokens.
//
// Weights go from memory to registers in the order of the tensor cores' operands, 16 bytes of a row a thread: which
// columns meet in a product does not matter as long as those of x are the same. The warps of a block have the same rows
// and take turns along k; their sums meet in shared memory. So nothing waits for another block, and what a block asks
// for next is on its way while it multiplies, across tiles, and before the kernel in front has ended.
//
// Set by the compiler's options: K columns, TOKENS (8 to 64), PIECES of 16 rows in a tile, WARPS, DEPTH turns in flight,
// RESIDENT blocks of a multiprocessor, GROUPED (a scale for each 128 columns of a token and 128 x 128 of the matrix;
// else for each token and row), WHOLE (int8), HAS_BIAS, BF16 (else float16); NORMED, ROUNDED, KEPT 24: x is one token in 16
// bits, which goes through `alone.cuh` first, with KEPT the matrix lies as `quant/packed.py` has it; GATED: rows n and on of
// the matrix meet those before, silu(one) * other is written.

constexpr int TURN = 128;  // columns that a warp takes at a time
constexpr int TURNS = (K + TURN - 1) / TURN;
constexpr int OWN_TURNS = (TURNS + WARPS - 1) / WARPS;  // of a warp in each tile
constexpr bool EXACT = K % (TURN * WARPS) == 0;

#if WHOLE
using Sum = int;
#else
using Sum = float;
#endif
#if KEPT
using Left = float;  // by a warp for the others
#else
using Left = Sum;
#endif

constexpr int OUT_ROWS = GATED ? ROWS / 2 : ROWS;  // of the result, in a tile

static_assert(!(WHOLE && GROUPED) && !((ALONE || GATED) && GROUPED) && (WHOLE || !KEPT));
static_assert(K % (KEPT ? 8 : 16) == 0 && TOKENS % 8 == 0 && 128 % ROWS == 0);

struct Weights {
    u32 of[PIECES][2][2][4];  // 16 rows, 64 columns, eight of those rows: 16 bytes
};

__device__ __forceinline__ void ask(Weights& to, const unsigned char* w, Cursor& at, int warp, int lane, int n, int step) {
    const int column = (at.turn * WARPS + warp) * TURN + lane % 4 * 16;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
                const int wanted = at.tile * OUT_ROWS + (GATED ? piece * 8 : piece * 16 + eight * 8) + lane / 4;
                const int row = (wanted < n ? wanted : n - 1) + (GATED ? eight * n : 0);
                u32(&x)[4] = to.of[piece][half][eight];
                if (KEPT && (EXACT || column / TURN < TURNS)) {
                    const u64 all = GATED ? 2 * n : n;
                    load_once(w + (column / TURN * all + row) * TURN + column % TURN + half * 64, x);
                } else if (!KEPT && (EXACT || column + half * 64 < K)) {
                    load_once(w + static_cast<u64>(row) * K + column + half * 64, x);
                } else {
                    x[0] = x[1] = x[2] = x[3] = 0;
                }
            }
        }
    }
    at.advance(OWN_TURNS, step);
}

__device__ __forceinline__ void multiply_turn(
    Sum (&sum)[PIECES][EIGHTS][4], const Weights& weights, const unsigned char* x, u32 alone, int column, int lane, int m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            const int token = eight * 8 + lane / 4, at = column + half * 64 + lane % 4 * 16;
            u32 b[4] = {0, 0, 0, 0};
            if constexpr (ALONE) {
                // All tokens of the eight are this one, or its bytes.
                if (EXACT || KEPT || at < K) load_shared(alone + at, b);
            } else {
                if (token < m && (EXACT || at < K)) load_global(x + static_cast<u64>(token) * K + at, b);
            }
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                const u32(&low)[4] = weights.of[piece][half][0];
                const u32(&high)[4] = weights.of[piece][half][1];
                multiply_bytes(sum[piece][eight], low[0], high[0], low[1], high[1], b[0], b[1]);
                multiply_bytes(sum[piece][eight], low[2], high[2], low[3], high[3], b[2], b[3]);
            }
        }
    }
}

#if KEPT
// A warp's sums of a tile, for the others: those of the three bytes together. back: of `keep`.
__device__ __forceinline__ void leave_kept(float* parts, const int (&sum)[PIECES][EIGHTS][4], float back) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
            const int first = sum[piece][0][2 * eight], third = __shfl_sync(~0u, first, lane | 1);  // the next lane's
            const float all = static_cast<float>(third) * 65536.0f + static_cast<float>(sum[piece][0][2 * eight + 1]) * 256.0f;
            if (lane % 4 == 0) parts[warp * TOKENS * PITCH + piece * 16 + lane / 4 + eight * 8] = (all + static_cast<float>(first)) * back;
        }
    }
}
#endif

// The warps' sums of a tile, added up, scaled and written. own: the scale of a token that was rounded here, or what a warp's
// sums are to be multiplied by.
__device__ __forceinline__ void finish(
    const Sum (&sum)[PIECES][EIGHTS][4], const float* x_scales, float own, const float* w_scales, const u16* bias, u16* out,
    int tile, int m, int n) {
    Left* const parts = reinterpret_cast<Left*>(shared_memory());
#if KEPT
    leave_kept(parts, sum, own);
#else
    leave(parts, sum);
#endif
    __syncthreads();
    for (int i = threadIdx.x; i < OUT_ROWS * m; i += WARPS * 32) {
        const int token = i / OUT_ROWS, row = i % OUT_ROWS, at = tile * OUT_ROWS + row;
        if (at >= n) continue;
        const float by = GROUPED || KEPT ? 1.0f : ALONE ? own : x_scales[token];
        const int place = GATED ? row / 8 * 16 + row % 8 : row;
        float value = static_cast<float>(added_up(parts, token, place));
        if (!GROUPED) value *= by * w_scales[at];
        if (HAS_BIAS) value += one(bias[at]);
        if constexpr (GATED) {
            float up = static_cast<float>(added_up(parts, token, place + 8)) * (by * w_scales[n + at]);
            if (HAS_BIAS) up += one(bias[n + at]);
            out[static_cast<u64>(token) * n + at] = gated(value, up);
        } else {
            out[static_cast<u64>(token) * n + at] = narrow(value);
        }
    }
    __syncthreads();
}

// x: [m, k], x_scales: [m], or [k / 128, m]; w: [n, k], w_scales: [n], or [n / 128, k / 128] with rows `w_stride` apart;
// of GATED both have 2 n rows. step: how many blocks there are. delta and on: of `Given`.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) product_of_bytes(
    const void* given_x, const float* x_scales, const unsigned char* w, const float* w_scales, const u16* bias,
    u16* out, int m, int n, int w_stride, int step, const u16* delta, const u16* norm, u16* total_x, float eps) {
    const unsigned char* const x = static_cast<const unsigned char*>(given_x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = (n + OUT_ROWS - 1) / OUT_ROWS;
    const int first = blockIdx.x;
    const int total = (tiles - first + step - 1) / step * OWN_TURNS;
    Weights ring[DEPTH];
    Cursor next{first, 0};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (i < total) ask(ring[i], w, next, warp, lane, n, step);
    }
    u32 alone = shared_address(shared_memory()) + PARTS_BYTES;
    float own = 1.0f;
    const Given given = {static_cast<const u16*>(given_x), delta, norm, total_x, eps};
#if KEPT
    own = keep<TURN>(given, alone + SCRATCH_BYTES, 0, reinterpret_cast<float*>(shared_memory() + PARTS_BYTES), warp);
    alone += SCRATCH_BYTES + (lane / 4 < 3 ? lane / 4 : 0) * Turns<TURN>::PADDED;
#elif ROUNDED
    own = prepare(given, alone, reinterpret_cast<float*>(shared_memory()));
#else
    wait_for_kernel_in_front();
    let_next_kernel_start();
#endif
    Sum sum[PIECES][EIGHTS][4];
    clear(sum);
    Cursor here{first, 0};
    for (int begin = 0; begin < total; begin += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            if (begin + i >= total) break;
            const int turn = here.turn * WARPS + warp;
            if constexpr (GROUPED) {
                if (EXACT || turn < TURNS) {
                    Sum part[PIECES][EIGHTS][4];
                    clear(part);
                    multiply_turn(part, ring[i], x, alone, turn * TURN, lane, m);
                    const float by = w_scales[here.tile * ROWS / 128 * w_stride + turn];
#pragma unroll
                    for (int j = 0; j < EIGHTS * 2; ++j) {
                        const int token = j / 2 * 8 + lane % 4 * 2 + j % 2;
                        const float scale = token < m ? by * x_scales[turn * m + token] : 0.0f;
#pragma unroll
                        for (int piece = 0; piece < PIECES; ++piece) {
                            sum[piece][j / 2][j % 2] += scale * part[piece][j / 2][j % 2];
                            sum[piece][j / 2][2 + j % 2] += scale * part[piece][j / 2][2 + j % 2];
                        }
                    }
                }
            } else {
                multiply_turn(sum, ring[i], x, alone, turn * TURN, lane, m);
            }
            if (begin + i + DEPTH < total) ask(ring[i], w, next, warp, lane, n, step);
            if (++here.turn == OWN_TURNS) {
                finish(sum, x_scales, own, w_scales, bias, out, here.tile, m, n);
                clear(sum);
                here = {here.tile + step, 0};
            }
        }
    }
}
