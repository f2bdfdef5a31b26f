// What products of a few tokens have in common, whose warps have the same rows and take turns along k: their sums meet
// in shared memory. Behind the constants of `bytes.cu` or `nibbles.cu`, which include it.

constexpr int ROWS = 16 * PIECES;
constexpr int EIGHTS = TOKENS / 8;
constexpr int PITCH = ROWS + 4;  // of a token's sums in shared memory: no two threads on the same banks

// What a warp asks for, one turn after another.
struct Cursor {
    int tile, turn;

    __device__ __forceinline__ void advance(int turns, int step) {
        if (++turn == turns) turn = 0, tile += step;
    }
};

template <typename Sum>
__device__ __forceinline__ void clear(Sum (&sum)[PIECES][EIGHTS][4]) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[piece][eight][i] = 0;
        }
    }
}

// A warp's sums of a tile, for the others.
template <typename Sum>
__device__ __forceinline__ void leave(Sum* parts, const Sum (&sum)[PIECES][EIGHTS][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = eight * 8 + lane % 4 * 2 + i % 2, row = piece * 16 + lane / 4 + i / 2 * 8;
                parts[(warp * TOKENS + token) * PITCH + row] = sum[piece][eight][i];
            }
        }
    }
}

// Of all warps.
template <typename Sum>
__device__ __forceinline__ Sum added_up(const Sum* parts, int token, int row) {
    Sum all = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) all += parts[(warp * TOKENS + token) * PITCH + row];
    return all;
}
