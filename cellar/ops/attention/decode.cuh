// What decodes on Hopper (`decode.cu`) have in common, whatever form K and V are in.
//
// Set by the compiler's options: DIM (multiples of 64), CHUNK (16, 32, 64), KV_HEADS, GROUP (up to 8), WARPS (multiples
// of 4), STAGES, TILES (of 16 tokens, a warp's in a stage), AT_ONCE (blocks that share a multiprocessor), BF16 (else
// float16). FP8 and INT4 say that the cache has codes and scales.
//
// Decodes of a step that has prompts, too, come when q is rotated and all K and V are in the cache: `k` is null then, and
// nothing is written. The kernel in front may be the one of the prompts, which lets this one begin when the rotation has
// ended (`beside`): who is behind both waits for this one, so it waits for the prompts at its end.

#if FP8 || INT4
using Stored = unsigned char;
#else
using Stored = u16;
#endif

constexpr int OWN = 16 * TILES;                  // tokens of a stage that one warp has
constexpr int TURN = 4 * OWN;                    // tokens of a stage, for a team's four warps
constexpr int PER_TURN = TURN / CHUNK;
constexpr int TEAMS = WARPS / 4;                 // they take stages by turns
constexpr int THREADS = WARPS * 32;              // that compute
constexpr int SUM_PITCH = DIM + 4;               // floats: lanes of different queries write to different banks
constexpr int Q_PITCH = DIM + 8;                 // 16-bit: eight queries are read from different banks
constexpr int TILE = 16;                         // rows of a part in the scratch
constexpr int HEADER = 32;                       // of the list, in words
constexpr int FIELDS = 16;                       // of an item in it
constexpr float FAR = 8.0f, LOWEST = -1.0e30f;

static_assert(DIM % 64 == 0 && TURN % CHUNK == 0 && WARPS % 4 == 0 && GROUP <= 8);
// A stage is one team's: who skipped a round of it would take the round before for the one it waits for.
static_assert(STAGES % TEAMS == 0);

struct Shared {  // beside the stages
    float sums[WARPS][GROUP][SUM_PITCH];
    float tops[WARPS][GROUP];
    float totals[WARPS][GROUP];
    alignas(16) float new_key[DIM];
    alignas(16) float new_value[DIM];
    float new_score[GROUP];
    float factors[8];  // what products with the queries are multiplied by
#if INT4
    float halves[8][2];  // sums of their lower and upper halves
#endif
    alignas(16) u16 queries[8][Q_PITCH];
    u64 full[STAGES];
    u64 empty[STAGES];
    u64 told[2], heard[2];
    int items[2][FIELDS];  // that are loaded: the list's fields, and in the last one the KV head, or -1 for the end
    int arrived;
};

struct Arguments {
    const u16* q;
    const u16* k;
    const u16* v;
    const float* cos_sin;
    Stored* k_cache;
    Stored* v_cache;
    const int* table;
    u16* out;
    const int* meta;
    float* partial;
    float* extents;
    int* counters;
    int* claimed;
    long long q_token, q_head, k_token, k_head, v_token, v_head, k_slot, v_slot, cache_head, table_row, out_token, out_head;
    float scale;
    int rotary_dim;
    int early;   // whether the next kernel's blocks may start where there is room
    int beside;  // whether the kernel in front computes the same step's prompts
};

struct Item {
    int row, token, start, first, last, partial, part, parts, counter, head;
    int stop;     // of what is read from the cache
    bool newest;  // whether the step's own K and V are written and seen here
};

__device__ __forceinline__ void sync_computing() { sync_threads(1, THREADS); }

__device__ __forceinline__ float over_rows(float x) {  // the largest of the lanes that hold the same query
    for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

// Element d of a head with its rotary embedding; its partner lies half of the turning dimensions away.
__device__ __forceinline__ float rotated(const u16* x, const float* cos_sin, int rotary_dim, int position, int d) {
    const float mine = one(written(x + d));
    if (d >= rotary_dim) return mine;
    const int half = rotary_dim / 2, pair = d < half ? d : d - half;
    const float* at = cos_sin + static_cast<long long>(position) * rotary_dim + pair;
    const float other = one(written(x + (d < half ? d + half : pair))), sine = at[half];
    return mine * at[0] + other * (d < half ? -sine : sine);
}

