// All ranks of a collective on one machine (`test_peers.py`): blocks [r B, (r + 1) B) are rank r's, and each rank's calls come one
// after another, as launches of a stream do, while ranks may be apart.

enum { AT_ONCE, BY_PIECES, ROWS, FIRST, NORM, IN_BLANKS };

struct Rank {
    unsigned char* x;         // [calls, bytes of a call]
    unsigned char* out;       // the same, of rows side by side all ranks'
    const unsigned char *residual, *weight;
    unsigned char* normed;    // as `out`
    const u64* boxes;
    u32* calls;
    u64 ended;                // threads that have ended a call, zero at first
};

void all_ranks(Rank* ranks, const u32* kinds, const u64* nbytes, u32 count, u32 each) {
    const u32 rank = blockIdx.x / each, block = blockIdx.x % each;
    Rank& mine = ranks[rank];
    u64 at = 0, to = 0;
    for (u32 call = 0; call < count; ++call) {
        const u32 kind = kinds[call], bytes = static_cast<u32>(nbytes[call]), units = bytes / 8;
        const u32 wanted = kind == BY_PIECES || kind == IN_BLANKS ? (bytes / 16 + RANKS - 1) / RANKS : units;
        u32 used = std::min<u32>(each, (wanted + THREADS - 1) / THREADS);  // as peers.py launches
#ifdef WIDTH
        const u32 rows = bytes / (8 * UNITS * SLICES);
        if (kind == NORM) used = std::min<u32>(each, rows * SLICES);
#endif
        unsigned char *x = mine.x + at, *out = mine.out + to;
        if (block < used) {
            if (kind == AT_ONCE) add_at_once(x, out, mine.boxes, mine.calls, rank, units, block, used);
            if (kind == BY_PIECES) add_by_pieces(x, out, mine.boxes, mine.calls, rank, bytes / 16, block, used);
            if (kind == IN_BLANKS) add_in_blanks(x, out, mine.boxes, mine.calls, rank, bytes / 16, block, used);
            if (kind == ROWS) gather_at_once(x, out, mine.boxes, mine.calls, rank, units, units / 2, RANKS, block, used);
            if (kind == FIRST) gather_at_once(x, x, mine.boxes, mine.calls, rank, units, units, 1, block, used);
#ifdef WIDTH
            if (kind == NORM) {
                NormGiven given{x, mine.residual + at, mine.weight, mine.normed + to, out, mine.boxes, mine.calls, rank, rows, 1e-5f};
                add_and_norm(given, block, used);
            }
#endif
        }
        at += bytes, to += kind == ROWS ? RANKS * bytes : bytes;
        emulated::wait("what the launch has written", [] { return emulated::current->block->late == 0; });
        ++mine.ended;
        const u64 all = static_cast<u64>(call + 1) * each * THREADS;
        emulated::wait("the launch in front", [&mine, all] { return mine.ended >= all; });
    }
}
