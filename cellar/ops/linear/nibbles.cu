// Products of a few tokens by a matrix in 4 bits on Hopper: out[m, n] = x[m, k] w[n, k]^T, where each group of columns of
// a row has a scale and a zero point. And the matrix written out, for products of many tokens by the library.
//
// Codes lie in the order of the tensor cores' operands (`quant/nibbles.py` says where): 16 bytes are what a thread needs
// of 16 rows and 64 columns, a word is one instruction's, and a mask makes two numbers of two codes. What the mask adds
// to them and the zero point are taken away by one addition for both, exactly; scales go onto sums of 64 columns, or 32.
// The warps of a block, and the blocks of a cluster, have the same rows and take turns along k; their sums meet in shared
// memory. What a warp asks for next is on its way while it multiplies, across tiles, and before the kernel in front has
// ended.
//
// Set by the compiler's options: K columns, GROUP of them that share a scale, TOKENS (8 to 64), PIECES of 16 rows in a
// tile, WARPS, CLUSTER blocks of a cluster, LOADS of 64 columns in a turn, DEPTH turns in flight, RESIDENT blocks of a
// multiprocessor, HAS_ZEROS (else 8 stands for 0), HAS_BIAS, BF16 (else float16), BF16_SCALES (else float16);
// KEPT 16: x is one token, which becomes float16 times a power of two first (`kept.cuh`), NORMED: behind its norm; GATED:
// rows n and on of the matrix meet those before, silu(one) * other is written.

constexpr int WIDTH = 64;             // columns of a load: a block of the matrix
constexpr int BLOCKS = K / WIDTH;
constexpr int TURN = WIDTH * LOADS;   // columns that a warp takes at a time
constexpr int TURNS = (K + TURN - 1) / TURN;
constexpr int OWN_TURNS = (TURNS + WARPS * CLUSTER - 1) / (WARPS * CLUSTER);  // of a warp in each tile
constexpr bool EXACT = BLOCKS % (LOADS * WARPS * CLUSTER) == 0;
constexpr int GROUPS = K / GROUP;
constexpr int TURN_GROUPS = TURN > GROUP ? TURN / GROUP : 1;
constexpr int ASKED = KEPT ? 1 : TURN_GROUPS;  // of a turn's groups, those whose scales a lane has
constexpr int PARTS = WIDTH > GROUP ? WIDTH / GROUP : 1;  // of a load, each with a scale
constexpr int WORDS = 4 / PARTS;                          // of those
constexpr int OWNED = (TOKENS + CLUSTER - 1) / CLUSTER;   // tokens whose sums a block of a cluster adds up

constexpr int OUT_PIECES = GATED ? PIECES / 2 : PIECES;    // of the result, in a tile
constexpr int OUT_ROWS = 16 * OUT_PIECES;

static_assert(!GATED || (CLUSTER == 1 && PIECES % 2 == 0));
static_assert(K % WIDTH == 0 && K % GROUP == 0 && TOKENS % 8 == 0);
static_assert(GROUP == 32 || GROUP == 64 || GROUP == 128);
static_assert(TURN <= GROUP ? GROUP % TURN == 0 : TURN % GROUP == 0);

// A number whose last bits are a code, and what the code is worth more than that: 128 in bfloat16, whose mantissa ends
// with 1 there; 64 in float16, whose mantissa has 1 four bits further up.
constexpr u32 RAISE = BF16 ? 0x43004300 : 0x54005400, LOWER = RAISE | 0x80008000;
constexpr u32 MASK = BF16 ? 0x000f000f : 0x00f000f0;
constexpr u32 UNIT = BF16 ? 0x00010001 : 0x00100010;

struct Weights {
    u32 codes[PIECES][LOADS][4];
    u32 scales[PIECES][ASKED];  // of rows lane / 4 and eight behind
    u32 zeros[PIECES][ASKED];   // two bytes
};

// What this lane takes of the first piece, block and group; of the last tile's first piece the number.
struct Matrix {
    const u32* codes;   // of [pieces, BLOCKS, 32 lanes, 4]
    const u32* scales;  // of [pieces, GROUPS, 8, 2] of 16 bits
    const u16* zeros;   // of [pieces, GROUPS, 8, 2] of 8 bits
    int last;
    int apart;          // GATED: pieces from a gate's rows to those that it meets
    int group;          // KEPT: which of a turn's this lane takes; else the first

    // Of a tile's i-th piece, counted from its first.
    __device__ __forceinline__ int piece(int i) const { return GATED && i >= OUT_PIECES ? i - OUT_PIECES + apart : i; }
};

// The last tile ends where the matrix does: rows that two tiles have are the same in both.
__device__ __forceinline__ int first_piece(int tile, int last) { return tile * OUT_PIECES < last ? tile * OUT_PIECES : last; }

__device__ __forceinline__ void ask(Weights& to, const Matrix& w, const Cursor& at, int taker) {
    const int turn = at.turn * CLUSTER * WARPS + taker, piece = first_piece(at.tile, w.last);
    const int block = turn * LOADS, group = turn * TURN / GROUP;
    const u32* const codes = w.codes + static_cast<u64>(piece * BLOCKS + block) * 128;
    const u32* const scales = w.scales + static_cast<u64>(piece * GROUPS + group) * 8;
    const u16* const zeros = w.zeros + static_cast<u64>(piece * GROUPS + group) * 8;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            u32(&x)[4] = to.codes[i][load];
            if (EXACT || block + load < BLOCKS) {
                load_once(codes + (w.piece(i) * BLOCKS + load) * 128, x);
            } else {
                x[0] = x[1] = x[2] = x[3] = 0;
            }
        }
#pragma unroll
        for (int g = 0; g < ASKED; ++g) {
            to.scales[i][g] = to.zeros[i][g] = 0;
            if (EXACT || group + g + w.group < GROUPS) {
                load_kept(scales + (w.piece(i) * GROUPS + g) * 8, to.scales[i][g]);
                if (HAS_ZEROS) load_kept(zeros + (w.piece(i) * GROUPS + g) * 8, to.zeros[i][g]);
            }
        }
    }
}

// What is added to a raised code of a row, twice. row: 0, or 1 for the one eight behind.
__device__ __forceinline__ u32 lower(u32 zeros, int row) {
    if (!HAS_ZEROS) return LOWER + 8 * UNIT;
    // In bfloat16 zero points are the lower bytes as they are.
    if (BF16) return bytes_of(zeros, LOWER >> 8, row ? 0x4141 : 0x4040);
    return LOWER + (zeros >> 8 * row & 255) * UNIT;
}

__device__ __forceinline__ float scale(u32 scales, int row) {
    if (BF16_SCALES) return __uint_as_float(row ? scales & 0xffff0000 : scales << 16);
    return of_half(row ? scales >> 16 : scales);
}

// The operand of an instruction: codes of two rows less their zero points, pairs of neighbouring columns.
__device__ __forceinline__ void numbers(u32 (&a)[4], u32 codes, const u32 (&less)[2]) {
    constexpr int up = BF16 ? 0 : 4;  // to where float16 has its 1
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 placed = 4 * i < up ? codes << up : codes >> (4 * i - up);
        a[i] = add_two(masked_with(placed, MASK, RAISE), less[i % 2]);
    }
}

// tokens: this lane's columns of the first block, of its token of each eight. Where the matrix has ended, scales are 0 and
// any columns will do.
__device__ __forceinline__ void multiply_turn(
    float (&sum)[PIECES][EIGHTS][4], const Weights& weights, const u16* const (&tokens)[EIGHTS], int turn) {
    const u16* x[EIGHTS];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        x[eight] = tokens[eight] + static_cast<u64>(EXACT || turn < TURNS ? turn : 0) * TURN;
    }
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        u32 a[PIECES][4][4];
        float by[PIECES][PARTS][2];
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const int group = TURN > GROUP ? (load * WIDTH + part * GROUP) / GROUP : 0;
                u32 less[2];
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    less[row] = lower(weights.zeros[piece][group], row);
                    by[piece][part][row] = scale(weights.scales[piece][group], row);
                }
#pragma unroll
                for (int word = part * WORDS; word < (part + 1) * WORDS; ++word) {
                    numbers(a[piece][word], weights.codes[piece][load][word], less);
                }
            }
        }
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            u32 b[2][4];
            const int within = EXACT || turn * LOADS + load < BLOCKS ? load * WIDTH : 0;
            load_global(x[eight] + within, b[0]);
            load_global(x[eight] + within + 32, b[1]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                float sums[PIECES][4];
#pragma unroll
                for (int word = part * WORDS; word < (part + 1) * WORDS; ++word) {
#pragma unroll
                    for (int piece = 0; piece < PIECES; ++piece) {
                        const u32 low = b[word / 2][word % 2 * 2], high = b[word / 2][word % 2 * 2 + 1];
                        if (word == part * WORDS) {
                            multiply_first(sums[piece], a[piece][word], low, high);
                        } else {
                            multiply(sums[piece], a[piece][word], low, high);
                        }
                    }
                }
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[piece][eight][i] += by[piece][part][i / 2] * sums[piece][i];
                }
            }
        }
    }
}

#if KEPT
// Codes as they lie are numbers of float16, the smallest that there are: 2^-24 times the code, four bits further up 2^-20
// times. So two masks and a shift make an operand of a word, and rows eight behind have sums that are 16 times as large.
constexpr float ROW_UP = 16777216.0f, LATER_ROW_UP = 1048576.0f;  // what rows are to be multiplied by afterwards

// token: the first 16 bytes of this lane; sums: the first of `keep` that this lane takes. Every token of the eight is this
// one, so all four lanes of a row have its sums; of a turn's groups each lane goes on with one.
__device__ __forceinline__ void multiply_kept(
    float (&sum)[PIECES][EIGHTS][4], const Weights& weights, u32 token, u32 sums, int place) {
    constexpr int SHARING = LOADS * 4 / TURN_GROUPS;  // words that share a scale
    u32 b[LOADS * 2][4], less;
#pragma unroll
    for (int i = 0; i < LOADS * 2; ++i) load_shared(token + place * TURN * 2 + i * 64, b[i]);
    load_word(sums + place * TURN_GROUPS * 4, less);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        float row = 0, later_row = 0;
#pragma unroll
        for (int group = 0; group < TURN_GROUPS; ++group) {
            float found[4];
#pragma unroll
            for (int word = group * SHARING; word < (group + 1) * SHARING; ++word) {
                const u32 codes = weights.codes[piece][word / 4][word % 4], later = codes >> 8;
                const u32 a[4] = {codes & 0x000f000f, codes & 0x00f000f0, later & 0x000f000f, later & 0x00f000f0};
                const u32 low = b[word / 2][word % 2 * 2], high = b[word / 2][word % 2 * 2 + 1];
                if (word == group * SHARING) {
                    multiply_halves_first(found, a, low, high);
                } else {
                    multiply_halves(found, a, low, high);
                }
            }
            if (group == 0 || threadIdx.x % TURN_GROUPS == group) row = found[0], later_row = found[2];
        }
        const u32 zeros = HAS_ZEROS ? weights.zeros[piece][0] : 0x0808, scales = weights.scales[piece][0];
        const float zero = __uint_as_float(less) * (1.0f / ROW_UP) * static_cast<float>(zeros & 255);
        const float later_zero = __uint_as_float(less) * (1.0f / LATER_ROW_UP) * static_cast<float>(zeros >> 8);
        sum[piece][0][0] += scale(scales, 0) * (row - zero);
        sum[piece][0][2] += scale(scales, 1) * (later_row - later_zero);
    }
}

// A warp's sums of a tile, for the others. back: of `keep`.
__device__ __forceinline__ void leave_kept(float* parts, const float (&sum)[PIECES][EIGHTS][4], float back) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
            float all = sum[piece][0][2 * eight];
#pragma unroll
            for (int distance = 1; distance < TURN_GROUPS; distance *= 2) all += __shfl_xor_sync(~0u, all, distance);
            float* const to = parts + warp * TOKENS * PITCH + piece * 16 + lane / 4 + eight * 8;
            if (lane % 4 == 0) *to = all * (eight ? LATER_ROW_UP : ROW_UP) * back;
        }
    }
}
#endif

struct Result {
    const u16* bias;
    u16* out;
    int m, n;

    __device__ __forceinline__ void write(int token, int row, float value) const {
        if (row >= n) return;
        if (HAS_BIAS) value += one(bias[row]);
        out[static_cast<u64>(token) * n + row] = narrow(value);
    }

    __device__ __forceinline__ void write_gated(int token, int row, float gate, float up) const {
        if (row >= n) return;
        if (HAS_BIAS) gate += one(bias[row]), up += one(bias[n + row]);
        out[static_cast<u64>(token) * n + row] = gated(gate, up);
    }
};

// The sums of a tile, whose first row is `first`, added up and written. In a cluster each block does so for some tokens, of which the others send
// theirs; `turn` says into which of two places: what was there before has been read when all blocks have met again.
__device__ __forceinline__ void finish(
    const float (&sum)[PIECES][EIGHTS][4], float back, const Result& result, int first, int turn) {
    float* const parts = reinterpret_cast<float*>(shared_memory());
    float* const sent = parts + WARPS * TOKENS * PITCH + turn % 2 * CLUSTER * OWNED * ROWS;
    const u32 rank = CLUSTER > 1 ? rank_in_cluster() : 0;
#if KEPT
    leave_kept(parts, sum, back);
#else
    leave(parts, sum);
#endif
    __syncthreads();
    if constexpr (CLUSTER == 1) {
#pragma unroll 1
        for (int i = threadIdx.x; i < OUT_ROWS * result.m; i += WARPS * 32) {
            const int token = i / OUT_ROWS, row = i % OUT_ROWS;
            if constexpr (GATED) {
                result.write_gated(token, first + row, added_up(parts, token, row), added_up(parts, token, row + OUT_ROWS));
            } else {
                result.write(token, first + row, added_up(parts, token, row));
            }
        }
        __syncthreads();
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS / 4 * result.m; i += WARPS * 32) {
            const int token = i / (ROWS / 4), row = i % (ROWS / 4) * 4;
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) four[j] = added_up(parts, token, row + j);
            const float* const to = sent + (rank * OWNED + token / CLUSTER) * ROWS + row;
            store_cluster(in_block(shared_address(to), token % CLUSTER), four);
        }
        cluster_sync<true>();
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * OWNED; i += WARPS * 32) {
            const int own = i / ROWS, row = i % ROWS, token = own * CLUSTER + rank;
            if (token >= result.m) break;
            float all = 0;
#pragma unroll
            for (int other = 0; other < CLUSTER; ++other) all += sent[(other * OWNED + own) * ROWS + row];
            result.write(token, first + row, all);
        }
    }
}

// x: [m, K]; step: how many clusters there are. n: rows of the result, of which GATED has half the matrix's, a multiple
// of 16. delta and on: of `Given`.
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) product_of_nibbles(
    const u16* x, const u32* codes, const u32* scales, const u16* zeros, const u16* bias, u16* out, int m, int n, int step,
    const u16* delta, const u16* norm, u16* total_x, float eps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int pieces = (n + 15) / 16, tiles = (pieces + OUT_PIECES - 1) / OUT_PIECES, first = blockIdx.x / CLUSTER;
    const int group = KEPT ? lane % TURN_GROUPS : 0, own = group * 8 + lane / 4;
    const Matrix w = {codes + lane * 4, scales + own, zeros + own, pieces - OUT_PIECES, pieces, group};
    const Result result = {bias, out, m, n};
    const u16* tokens[EIGHTS];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
        const int token = eight * 8 + lane / 4;
        tokens[eight] = x + static_cast<u64>(token < m ? token : m - 1) * K + lane % 4 * 8;  // nobody reads what is beyond
    }
    const int taker = (CLUSTER > 1 ? rank_in_cluster() * WARPS : 0) + warp;
    const int total = (tiles - first + step - 1) / step * OWN_TURNS;
    Weights ring[DEPTH];
    Cursor next{first, 0};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (i < total) {
            ask(ring[i], w, next, taker);
            next.advance(OWN_TURNS, step);
        }
    }
    if constexpr (CLUSTER > 1) cluster_sync<false>();  // nobody sends before all are there
    float back = 1.0f;
#if KEPT
    const u32 at_first = PARTS_BYTES + (CLUSTER > 1 ? 2 * CLUSTER * OWNED * ROWS * 4 : 0);
    float* const scratch = reinterpret_cast<float*>(shared_memory() + at_first);
    const u32 token = shared_address(scratch) + SCRATCH_BYTES, sums = token + Turns<TURN>::PADDED * 2;
    back = keep<TURN>({x, delta, norm, total_x, eps}, token, sums, scratch, taker);
#else
    wait_for_kernel_in_front();
    let_next_kernel_start();
#endif
    float sum[PIECES][EIGHTS][4];
    clear(sum);
    Cursor here{first, 0};
    int finished = 0;
    for (int begin = 0; begin < total; begin += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            if (begin + i >= total) break;
#if KEPT
            multiply_kept(sum, ring[i], token + lane % 4 * 16, sums + group * 4, NORMED ? here.turn * CLUSTER * WARPS + taker : place_of(here.turn));
#else
            multiply_turn(sum, ring[i], tokens, here.turn * CLUSTER * WARPS + taker);
#endif
            if (begin + i + DEPTH < total) {
                ask(ring[i], w, next, taker);
                next.advance(OWN_TURNS, step);
            }
            const int row = first_piece(here.tile, w.last) * 16;
            here.advance(OWN_TURNS, step);
            if (here.turn == 0) {
                finish(sum, back, result, row, finished++);
                clear(sum);
            }
        }
    }
}

// The matrix itself, [n, K]: a warp writes 16 rows and 64 columns.
extern "C" __global__ void __launch_bounds__(WARPS * 32) written_out(
    const u32* codes, const u32* scales, const u16* zeros, u16* out, int n) {
    const int lane = threadIdx.x % 32;
    const u64 at = static_cast<u64>(blockIdx.x) * WARPS + threadIdx.x / 32;  // piece and block
    const int piece = at / BLOCKS, block = at % BLOCKS;
    if (piece >= (n + 15) / 16) return;
    u32 words[4];
    load_once(codes + at * 128 + lane * 4, words);
    wait_for_kernel_in_front();
    let_next_kernel_start();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int below = piece * 16 + row * 8 + lane / 4;
        if (below >= n) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int from = (piece * GROUPS + (block * WIDTH + half * 32) / GROUP) * 8 + lane / 4;
            u32 stored, zero = 0, x[4];
            load_kept(scales + from, stored);
            if (HAS_ZEROS) load_kept(zeros + from, zero);
            const float by = scale(stored, row), less = HAS_ZEROS ? (zero >> 8 * row & 255) : 8;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const u32 pairs = words[half * 2 + pair / 2] >> (pair % 2 * 8 + row * 4);
                x[pair] = two((static_cast<float>(pairs & 15) - less) * by, (static_cast<float>(pairs >> 16 & 15) - less) * by);
            }
            store_global(out + static_cast<u64>(below) * K + block * WIDTH + half * 32 + lane % 4 * 8, x);
        }
    }
}
