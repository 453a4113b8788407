// An expression over rows: norms, softmax, losses, and their gradients.
//
// THREADS threads share a row, or BLOCKS_A_ROW times as many in as many blocks: a CLUSTER, or, where nothing is
// found in a row, such that know nothing of each other. Several passes go over the row: each ends in a reduction
// among the row's threads, or in a store. Between them a row waits, as it was stored,
//   REGISTERS  in the registers of the threads that loaded it;
//   STAGED     in shared memory, where the copy engine put it while the block worked on the row before; MOVED on
//              into registers as soon as it has come, where there is room for a single one;
//   STREAMED   nowhere: every pass reads it anew.
//
// Gradients of weights are sums over the rows: blocks are then PERSISTENT, walk over many rows, keep the sums
// of their columns in registers, and leave one row of partial sums each, which `sum_partials` adds up. Those of
// channels' weights, where rows are groups of channels, are sums over segments of the rows: each row leaves
// what its segments have, which `sum_partials` adds up as well.
// No atomics on results: two runs give the same bits. Blocks that keep their part of the weights stay as well. How
// threads of a row tell each other what they found is in rows_exchange.cuh; sums over all rows of what has one value a
// row in rows_totals.cuh.
//
// The prologue defines the constants above, KIND being one of the three, and
//   ROWS, BLOCK, VEC, PACKS       rows a block works on at a time; THREADS * ROWS; elements of a pack, packs
//                                 a thread has of a row
//   STAGES, STAGE_BYTES, PART     rows of a team in shared memory, or parts of them; bytes of one, its packs
//   RAGGED                        whether rows begin and end within packs, at addresses of whole packs; row.head then
//                                 is how many elements come before the first one
//   TURNS                         of short rows, how many a team has one after the other, all on their way at once
//   MOVED, OVERLAPS               whether a row's place is free for another as soon as it has come; whether the
//                                 first pass of the next one then comes before the last one of this
//   p.early                       whether the next kernel may begin as soon as all blocks of this one have
//   LATE                          whether what only the last pass reads has no place in a stage
//   WEIGHTS_STAGED, WEIGHTS_IN    whether the block's part of what is alike in all rows stays there as well; the
//                                 first pass that reads it
//   PASSES, VALUES, SUMS          passes over the row, uniform values that they find, sums over rows
//   SEGMENT_SUMS, segment_of(p, column)        sums over segments, of which p.segments make a row
//   CARRIED                       values of an element that a pass leaves to a later one
//   FINDS_MOMENTS, WEIGHTED       whether a pass finds moments; whether there are weights
//   Row, load_row(p, r)           what belongs to one row: where it begins, its uniform operands
//   Tile<W>, load_tile<W>(...)    the row's operands at W columns; staged_tile<W>(...) from shared memory
//   load_late<W>(...)             into a tile what only the last pass reads, if it has no place in a stage
//   fetch(p, row, first, end, ...)         have the copy engine bring columns of a row
//   fetch_ahead(p, row, first, end)        have the L2 ask for those of a later one
//   fetch_weights(...), find_weights(...)  the same of the weights; where they are then read
//   Known<PASS>, know(...)        uniform expressions of a pass
//   element<PASS, W>(...)         compute W columns: what this pass reduces into found[k], its outputs, sums; what
//                                 it leaves, or finds, in carried[k], if it CARRIES; add to of_segments
//   Values<PASS>::FIRST, COUNT    which of the values this pass finds; whether it ADDS_TO_SEGMENTS
//   identity<PASS>, join_lanes<PASS, N>                      its reductions: start, join lanes, and take in
//   collect<PASS, W>(values, found, column)                  `found`, packs of VEC that are STEP apart
//   store_row(p, row, values)     outputs with one value a row

#include "prelude.cuh"
#include "reductions.cuh"
#include "hopper.cuh"
#include "arrivals.cuh"
#include "rows_exchange.cuh"
#include "rows_totals.cuh"

// ---------------------------------------------------------------------------------------------
// Over a row

constexpr column_t STEP = THREADS * VEC;
constexpr int MOST_SUMS = SUMS ? SUMS : 1, MOST_CARRIED = CARRIED ? CARRIED : 1;
constexpr int MOST_SEGMENT_SUMS = SEGMENT_SUMS ? SEGMENT_SUMS : 1;
constexpr int OWN = KIND == STREAMED ? 1 : PACKS;  // packs that are a thread's from the first pass to the last
using Sums = acc_t[MOST_SUMS][VEC];
using Carried = acc_t[MOST_CARRIED][VEC];
using OfSegments = acc_t[MOST_SEGMENT_SUMS];
using SumsOfColumns = Sums[OWN];

// Before the first whole pack and after the last one threads have single elements, EDGES each.
constexpr int EDGES = RAGGED ? (2 * VEC - 2 + THREADS - 1) / THREADS : 0, MOST_EDGES = EDGES ? EDGES : 1;

// What a thread has of a row.
constexpr bool IN_REGISTERS = KIND == REGISTERS || MOVED;
struct Held {
    Tile<VEC> tiles[IN_REGISTERS ? PACKS : 1];
    Carried carried[OWN];
    Tile<1> edges[MOST_EDGES];
    acc_t carried_at_edges[MOST_EDGES][MOST_CARRIED][1];
};

// Packs of which a thread finds the values together. Of moments, whose joining is a fifth of a norm's instructions, also
// where blocks come and go, if there are the registers: of 64, for 16 values; of 80, for 32; from Blackwell on of 128.
constexpr int MOST_THREADS = __CUDA_ARCH__ >= 1000 ? 512 : KIND == REGISTERS && 4 * VEC * sizeof(acc_t) <= 64 ? 1024 : 768;
constexpr bool ROOM = MIN_BLOCKS * BLOCK <= MOST_THREADS;
constexpr bool MANY = (KIND == STAGED && PERSISTENT) || (KIND != STREAMED && FINDS_MOMENTS && ROOM);
constexpr int TOGETHER = MANY && !SUMS && !SEGMENT_SUMS && !CARRIES && PACKS >= 4 ? 4 : 1;
constexpr int WEIGHTS_AT = ROWS * STAGES * STAGE_BYTES, SEGMENTS_AT = KIND == STAGED ? WEIGHTS_AT : 0;

extern __shared__ __align__(128) char memory[];

struct Work {
    Row row;
    unsigned r;
    bool valid;
    column_t first, end;   // of the block's part of the row
    column_t edges, head;  // elements of no pack, of which so many come first
    int team, lane;
    const char* stage;
    Barrier* weights;
};

// Whether the thread has a k-th pack. Where all have all, one of ASKS_EVERY packs asks, and ptxas begins what the
// next one reads while this one is worked on: it moves nothing to before a branch.
__device__ __forceinline__ bool has_pack(const Work& work, int k) {
    constexpr int EVERY = __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1000 ? ASKS_EVERY : 1;  // others spill
    return k % EVERY || work.first + k * STEP < work.end;
}

// N packs, STEP apart, of which the values are reduced together: what a softmax or the moments do for each pack
// anew was a fifth of their instructions.
template <int PASS, int N>
__device__ __forceinline__ void take(const Params& p, const Work& work, const Known<PASS>& known,
                                     acc_t (&values)[MOST_VALUES], column_t column, const Tile<VEC> (&tiles)[N],
                                     Carried* carried, Sums* sums, OfSegments& of_segments) {
    acc_t found[MOST_VALUES][N * VEC];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        acc_t of_pack[MOST_VALUES][VEC];
        element<PASS, VEC>(p, work.row, known, column + n * STEP, tiles[n], of_pack, carried[n], sums[n], of_segments);
#pragma unroll
        for (int k = 0; k < MOST_VALUES; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v) found[k][n * VEC + v] = of_pack[k][v];
    }
    collect<PASS, N * VEC>(values, found, column);
}

__device__ __forceinline__ bool has_edge(const Work& work, int k) { return work.lane + k * THREADS < work.edges; }
__device__ __forceinline__ column_t edge(const Params& p, const Work& work, int k) {
    const column_t n = work.lane + k * THREADS;
    return n < work.head ? n : p.columns - work.edges + n;
}
template <int PASS>
__device__ __forceinline__ void look_at_edges(const Params& p, const Work& work, const Known<PASS>& known, Held& held,
                                              acc_t (&values)[MOST_VALUES]) {
#pragma unroll
    for (int k = 0; k < EDGES; ++k) {
        if (!has_edge(work, k)) continue;
        const column_t column = edge(p, work, k);
        if constexpr (!IN_REGISTERS) held.edges[k] = load_tile<1>(p, work.row, column);
        acc_t found[MOST_VALUES][1], sums[MOST_SUMS][1];
        OfSegments none;
        element<PASS, 1>(p, work.row, known, column, held.edges[k], found, held.carried_at_edges[k], sums, none);
        collect<PASS, 1>(values, found, column);
    }
}

// Every pass reads the row anew: N packs at a time, then half as many, and so on. (On Turing all spilled.)
constexpr int AT_A_TIME = __CUDA_ARCH__ < 800 ? (PACKS + 1) / 2 : PACKS;
template <int PASS, int N = AT_A_TIME>
__device__ __forceinline__ void stream(const Params& p, const Work& work, const Known<PASS>& known,
                                       acc_t (&values)[MOST_VALUES], column_t column) {
#pragma unroll 1
    for (; column + (N - 1) * STEP < work.end; column += N * STEP) {
        Tile<VEC> tiles[N];
#pragma unroll
        for (int n = 0; n < N; ++n) tiles[n] = load_tile<VEC>(p, work.row, column + n * STEP);
        Carried carried[N];
        Sums sums[N];
        OfSegments none;
        take<PASS>(p, work, known, values, column, tiles, carried, sums, none);
    }
    if constexpr (N > 1) stream<PASS, N / 2>(p, work, known, values, column);
}

// N packs from the k-th on, all of which the thread has.
template <int PASS, int N>
__device__ __forceinline__ void take_held(const Params& p, const Work& work, const Known<PASS>& known, Held& held,
                                          acc_t (&values)[MOST_VALUES], SumsOfColumns& sums, OfSegments& of_segments,
                                          int k) {
    Tile<VEC> tiles[N];
#pragma unroll
    for (int n = 0; n < N; ++n)
        if constexpr (IN_REGISTERS)
            tiles[n] = held.tiles[k + n];
        else
            tiles[n] = staged_tile<VEC>(work.stage, ((k + n) * THREADS + work.lane) * VEC);
    take<PASS>(p, work, known, values, work.first + k * STEP, tiles, held.carried + k, sums + k, of_segments);
}

#include "rows_segments.cuh"

template <int PASS>
__device__ __forceinline__ void look(const Params& p, const Work& work, Held& held,
                                     acc_t (&values)[MOST_VALUES], SumsOfColumns& sums) {
    Known<PASS> known;
    know(p, work.row, values, known);
    if constexpr (WEIGHTS_STAGED && PASS == WEIGHTS_IN) await(work.weights, 0);
    if constexpr (KIND == STREAMED) {
        stream<PASS>(p, work, known, values, work.first);
    } else {
        // In registers all packs have places of their own in the text; of a stage, as many as do not spill.
        constexpr int SOME = IN_REGISTERS && Values<PASS>::COUNT == 0 ? 1 : TOGETHER;
        constexpr int FEW = sizeof(Tile<VEC>) > 16 && !WEIGHTED && MIN_BLOCKS * BLOCK > 1024 ? 2 : 4;
        constexpr int UNROLL = !IN_REGISTERS && !(SUMS || CARRIES) && PACKS > FEW ? (FEW + SOME - 1) / SOME : PACKS;
        constexpr bool ADDS = Values<PASS>::ADDS_TO_SEGMENTS;
        Running running = {};
        if constexpr (ADDS) running = at_first_segment(p, work);
#pragma unroll UNROLL
        for (int k = 0; k < PACKS; k += SOME) {
            OfSegments of_segments = {};
            if (SOME > 1 && k + SOME <= PACKS && has_pack(work, k + SOME - 1)) {
                take_held<PASS, SOME>(p, work, known, held, values, sums, of_segments, k);
                continue;
            }
#pragma unroll
            for (int n = 0; n < SOME && k + n < PACKS; ++n)
                if (has_pack(work, k + n))
                    take_held<PASS, 1>(p, work, known, held, values, sums, of_segments, k + n);
            if constexpr (ADDS) add_to_segments(p, work, work.first + k * STEP, of_segments, running);
        }
        if constexpr (ADDS) flush(p, running);
    }
    if constexpr (RAGGED) look_at_edges<PASS>(p, work, known, held, values);
}

// What the compiler computed of a pack it would otherwise keep for the next pass, in full width.
__device__ __forceinline__ void hide(Held& held) {
    if constexpr (IN_REGISTERS)
#pragma unroll
        for (int k = 0; k < PACKS; ++k) hide(held.tiles[k]);
    if constexpr (IN_REGISTERS && RAGGED)
#pragma unroll
        for (int k = 0; k < EDGES; ++k) hide(held.edges[k]);
}

template <int PASS>
__device__ __forceinline__ void passes(const Params& p, const Work& work, Held& held,
                                       acc_t (&values)[MOST_VALUES], SumsOfColumns& sums, Exchange& exchange, int& turn) {
    identity<PASS>(values);
    if (work.valid) look<PASS>(p, work, held, values, sums);
    if constexpr (Values<PASS>::COUNT > 0) reduce<PASS>(values, exchange, turn, work.team, work.lane);
    if constexpr (PASS + 1 < PASSES) {
        hide(held);
        passes<PASS + 1>(p, work, held, values, sums, exchange, turn);
    }
}

__device__ __forceinline__ void load_tiles(const Params& p, const Work& work, Held& held) {
    if constexpr (KIND == REGISTERS)
#pragma unroll
        for (int k = 0; k < PACKS; ++k)
            if (has_pack(work, k)) held.tiles[k] = load_tile<VEC>(p, work.row, work.first + k * STEP);
    if constexpr (KIND == REGISTERS && RAGGED)
#pragma unroll
        for (int k = 0; k < EDGES; ++k)
            if (has_edge(work, k)) held.edges[k] = load_tile<1>(p, work.row, edge(p, work, k));
}

// A pack of every thread: where rows were, or of its own.
__device__ __forceinline__ acc_t* room_for_packs() {
    if constexpr (KIND == STAGED) return reinterpret_cast<acc_t*>(memory);
    __shared__ acc_t room[KIND != STAGED && ROWS > 1 ? BLOCK * VEC : 1];
    return room;
}

template <typename P>  // whose members exist only where there are sums
__device__ __forceinline__ void store_sums(const P& p, const Work& work, SumsOfColumns& sums, unsigned block) {
#pragma unroll
    for (int s = 0; s < SUMS; ++s)
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const column_t column = work.first + k * STEP;
            if constexpr (ROWS > 1) {
                acc_t* packs = room_for_packs() + work.lane * VEC;
                __syncthreads();
#pragma unroll
                for (int v = 0; v < VEC; ++v) packs[work.team * STEP + v] = sums[k][s][v];
                __syncthreads();
                for (int other = 1; other < ROWS && work.team == 0; ++other)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) sums[k][s][v] += packs[other * STEP + v];
            }
            if (work.team == 0 && has_pack(work, k)) {
                const unsigned long long at = static_cast<unsigned long long>(s) * p.chunks + block;
                store_pack<acc_t, VEC>(p.partials + at * p.columns + column, sums[k][s]);
            }
        }
}

template <typename P, typename R>  // whose members exist only where rows are ragged
__device__ __forceinline__ void find_edges(const P& p, const R& row, Work& work, unsigned rank) {
    work.head = min(row.head, p.columns);
    const column_t rest = p.columns - work.head, whole = rest - rest % VEC;
    work.first += work.head;
    work.end = work.head + min(whole, (rank + 1) * p.span);
    work.edges = rank == 0 ? p.columns - whole : 0;
}

// The work on row r, or none beyond the last one.
__device__ __forceinline__ Work begin(const Params& p, unsigned r, unsigned rank) {
    Work work;
    work.r = r, work.valid = r < p.rows;
    work.row = load_row(p, work.valid ? r : p.rows - 1);
    work.team = team_of_thread(), work.lane = lane_in_team();
    work.first = rank * p.span + work.lane * VEC;
    work.end = min(p.columns, (rank + 1) * p.span);
    if constexpr (RAGGED) find_edges(p, work.row, work, rank);
    if constexpr (WEIGHTS_STAGED) find_weights(work.row, rank * p.span, memory + WEIGHTS_AT);
    return work;
}

__device__ __forceinline__ void finish(const Params& p, const Work& work, unsigned rank, Held& held,
                                       SumsOfColumns& sums, Exchange& exchange, int& turn) {
    acc_t values[MOST_VALUES];
    if constexpr (SEGMENT_SUMS > 0) clear_segments(p, work);
    passes<0>(p, work, held, values, sums, exchange, turn);
    if (work.valid && work.lane == 0 && rank == 0) store_row(p, work.row, values);
    if constexpr (SEGMENT_SUMS > 0) store_segments(p, work, rank);
}

// Rows base + team, and so on every `step` rows.
__device__ __forceinline__ void walk(const Params& p, unsigned base, unsigned step, unsigned rank,
                                     SumsOfColumns& sums, Exchange& exchange) {
    int turn = 0;
    Held held;
    Work work = begin(p, base + team_of_thread(), rank);
    load_tiles(p, work, held);
    opened();
    for (;;) {
        base += step;
        const bool more = PERSISTENT && base < p.rows;
        Work next = work;
        Held ahead;
        if (more) {
            next = begin(p, base + work.team, rank);
            if (next.valid) load_tiles(p, next, ahead);
        }
        finish(p, work, rank, held, sums, exchange, turn);
        if (!more) break;
        work = next;
        held = ahead;
    }
}

__device__ __forceinline__ void take_turns(const Params& p, unsigned base, unsigned rank, SumsOfColumns& sums,
                                           Exchange& exchange) {
    Work works[TURNS];
    Held held[TURNS];
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
        works[t] = begin(p, base + t * ROWS + team_of_thread(), rank);
        load_tiles(p, works[t], held[t]);
    }
    opened();
    int turn = 0;
#pragma unroll
    for (int t = 0; t < TURNS; ++t) finish(p, works[t], rank, held[t], sums, exchange, turn);
}

// Rows that the copy engine puts into shared memory, one after the other around STAGES places; one thread of
// each team asks for them.
constexpr int PARTS = PACKS / PART;
static_assert(KIND != STAGED || PACKS % PART == 0, "parts are alike");
static_assert(KIND != STAGED || MOVED || PARTS == 1 || (PART == 1 && STAGES > PACKS),
              "walk_in_parts takes parts of one pack, and has places for all of a row");
static_assert(!LATE || (KIND == STAGED && PARTS > 1 && !MOVED), "walk_in_parts alone reads in the last pass");

struct Ring {
    char* memory;
    Barrier *full, *weights;
    int lane;
    unsigned place = 0, round = 0;
    __device__ __forceinline__ char* stage() const { return memory + place * STAGE_BYTES; }
    __device__ __forceinline__ void fetch_part(const Params& p, unsigned r, unsigned rank, int part = 0) const {
        if (lane != 0 || r >= p.rows) return;
        const column_t first = rank * p.span + part * PART * STEP;
        const column_t end = min(min(p.columns, (rank + 1) * p.span), first + PART * STEP);
        fetch(p, r, first, end, stage(), full + place);
        fetch_ahead(p, r, first, end);
    }
    __device__ __forceinline__ void wait() const { await(full + place, round & 1); }
    __device__ __forceinline__ void advance() {
        if (++place == STAGES) place = 0, ++round;
    }
};

__device__ __forceinline__ Ring fill(const Params& p, unsigned base, unsigned step, unsigned rank) {
    __shared__ Barrier full[ROWS][STAGES], weights;
    const int team = team_of_thread();
    if (threadIdx.x < ROWS * STAGES) make_barrier(&full[threadIdx.x / STAGES][threadIdx.x % STAGES], 1);
    if (WEIGHTS_STAGED && threadIdx.x == 0) make_barrier(&weights, 1);
    barriers_are_made();
    __syncthreads();
    Ring ring = {memory + team * STAGES * STAGE_BYTES, full[team], &weights, lane_in_team()};
    for (int s = 0; s < STAGES; ++s, ring.advance()) ring.fetch_part(p, base + s / PARTS * step + team, rank, s % PARTS);
    ring.round = 0;
    if (WEIGHTS_STAGED && threadIdx.x == 0)
        fetch_weights(p, rank * p.span, min(p.columns, (rank + 1) * p.span), memory + WEIGHTS_AT, &weights);
    opened();
    return ring;
}

// Into registers, part by part.
__device__ __forceinline__ void move_on(const Params& p, const Work& work, Held& held, Ring& ring, unsigned step,
                                        unsigned rank) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part, ring.advance()) {
        if (work.valid) ring.wait();
#pragma unroll
        for (int k = 0; k < PART; ++k)
            if (work.valid && has_pack(work, part * PART + k))
                held.tiles[part * PART + k] = staged_tile<VEC>(ring.stage(), (k * THREADS + work.lane) * VEC);
        meet();
        ring.fetch_part(p, work.r + (part + STAGES) / PARTS * step, rank, (part + STAGES) % PARTS);
    }
}

// The same with the copy engine up to STAGES - 1 rows ahead. (With a barrier of its own for "everyone has left
// this place", instead of __syncthreads, it was slower.)
__device__ __forceinline__ void walk_staged(const Params& p, unsigned base, unsigned step, unsigned rank,
                                            SumsOfColumns& sums, Exchange& exchange) {
    Ring ring = fill(p, base, step, rank);
    int turn = 0;
    Held held;
    Work work = begin(p, base + team_of_thread(), rank);
    for (; base < p.rows; base += step) {
        const Work next = begin(p, base + step + work.team, rank);  // its uniform operands are on their way
        work.stage = ring.stage(), work.weights = ring.weights;
        if constexpr (MOVED) move_on(p, work, held, ring, step, rank);
        else if (work.valid) ring.wait();
        finish(p, work, rank, held, sums, exchange, turn);
        if (!PERSISTENT) break;
        if constexpr (!MOVED) {
            meet();  // who is here has read the row for the last time
            ring.fetch_part(p, base + STAGES * step + work.team, rank);
            ring.advance();
        }
        work = next;
    }
}

// The same for two passes, the first one of the next row before the last one of this: threads meet once a row,
// and values travel among blocks while they work.
constexpr bool OVERLAPPED = KIND == STAGED && PERSISTENT && PASSES == 2 && (MOVED ? OVERLAPS : STAGES > 2);

__device__ __forceinline__ void first_look(const Params& p, Work& work, Ring& ring, Held& held,
                                           acc_t (&values)[MOST_VALUES], SumsOfColumns& sums, Exchange& exchange,
                                           int turn, unsigned step, unsigned rank) {
    work.stage = ring.stage(), work.weights = ring.weights;
    identity<0>(values);
    if constexpr (MOVED) move_on(p, work, held, ring, step, rank);
    else if (work.valid) ring.wait();
    if (work.valid) look<0>(p, work, held, values, sums);
    hide(held);
    publish<0>(values, exchange, turn, work.team, work.lane);
}

__device__ __forceinline__ void walk_overlapped(const Params& p, unsigned base, unsigned step, unsigned rank,
                                                SumsOfColumns& sums, Exchange& exchange) {
    Ring ring = fill(p, base, step, rank), left = ring;  // where the next row is, and the last one was
    int turn = 0;
    Held held, held_ahead;
    acc_t values[MOST_VALUES], ahead[MOST_VALUES];
    Work work = begin(p, base + team_of_thread(), rank);
    first_look(p, work, ring, held, values, sums, exchange, turn, step, rank);
    meet();
    gather<0>(values, exchange, turn, work.team, work.lane);
    receive<0>(values, exchange, turn, work.team, work.lane);
    for (bool first = true;; first = false) {
        const unsigned later = base + step;
        const bool more = later < p.rows;
        const Ring here = ring;
        Work next = begin(p, later + work.team, rank);
        if (more) {
            if constexpr (!MOVED) ring.advance();
            first_look(p, next, ring, held_ahead, ahead, sums, exchange, turn, step, rank);
        }
        meet();  // who is here has read the row before this one for the last time
        if (!MOVED && !first) left.fetch_part(p, base + (STAGES - 1) * step + work.team, rank);
        if (more) gather<0>(ahead, exchange, turn, work.team, work.lane);
        if (work.valid) {
            look<PASSES - 1>(p, work, held, values, sums);
            if (work.lane == 0 && rank == 0) store_row(p, work.row, values);
        }
        if (!more) break;
        receive<0>(ahead, exchange, turn, work.team, work.lane);
#pragma unroll
        for (int k = 0; k < MOST_VALUES; ++k) values[k] = ahead[k];
        held = held_ahead;
        left = here, work = next, base = later;
    }
}

// Rows of two passes of which there is room for little more than one: the places are of parts, each free for the
// next row as soon as the second pass has read it.
template <int PASS>
__device__ __forceinline__ void look_at_parts(const Params& p, const Work& work, Held& held, acc_t (&values)[MOST_VALUES],
                                              SumsOfColumns& sums, Ring& ring, unsigned r, unsigned step, unsigned rank) {
    Known<PASS> known;
    know(p, work.row, values, known);
    if constexpr (WEIGHTS_STAGED && PASS == WEIGHTS_IN) await(ring.weights, 0);
#pragma unroll
    for (int k = 0; k < PACKS; ++k, ring.advance()) {
        const column_t column = work.first + k * STEP;
        if (PASS == 0) ring.wait();
        if (has_pack(work, k)) {
            Tile<VEC> tile[1] = {staged_tile<VEC>(ring.stage(), work.lane * VEC)};
            if constexpr (PASS > 0) load_late(p, work.row, column, tile[0]);
            OfSegments none;
            take<PASS>(p, work, known, values, column, tile, held.carried + k, sums + k, none);
        }
        if (PASS > 0) {
            meet();
            ring.fetch_part(p, r + (k + STAGES) / PACKS * step, rank, (k + STAGES) % PACKS);
        }
    }
}
template <typename P>  // what it calls is then compiled only where it is called
__device__ __forceinline__ void walk_in_parts(const P& p, unsigned r, unsigned step, unsigned rank,
                                              SumsOfColumns& sums, Exchange& exchange) {
    Ring ring = fill(p, r, step, rank), first = ring;  // of either pass; a copy for each row made it spill
    int turn = 0;
    for (; r < p.rows; r += step) {
        const Work work = begin(p, r, rank);
        acc_t values[MOST_VALUES];
        Held held;
        identity<0>(values);
        look_at_parts<0>(p, work, held, values, sums, first, r, step, rank);
        reduce<0>(values, exchange, turn, work.team, work.lane);
        look_at_parts<PASSES - 1>(p, work, held, values, sums, ring, r, step, rank);
        if (work.lane == 0 && rank == 0) store_row(p, work.row, values);
    }
}

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(BLOCK, MIN_BLOCKS) rows(const __grid_constant__ Params p) {
    __shared__ Exchange exchange;
    static_assert(BLOCKS_A_ROW == CLUSTER || (VALUES == 0 && !PERSISTENT), "blocks of no cluster tell each other nothing");
    const unsigned rank = CLUSTER > 1 ? cluster_rank() : blockIdx.x % BLOCKS_A_ROW;
    const unsigned block = blockIdx.x / BLOCKS_A_ROW, blocks = gridDim.x / BLOCKS_A_ROW;
    open(exchange);
    if (p.early) next_may_begin();
    wait_for_kernel_before();
    SumsOfColumns sums = {};
    if constexpr (KIND == STAGED && PARTS > 1 && !MOVED) walk_in_parts(p, block, blocks, rank, sums, exchange);
    else if constexpr (OVERLAPPED) walk_overlapped(p, block * ROWS, blocks * ROWS, rank, sums, exchange);
    else if constexpr (KIND == STAGED) walk_staged(p, block * ROWS, blocks * ROWS, rank, sums, exchange);
    else if constexpr (TURNS > 1) take_turns(p, block * ROWS * TURNS, rank, sums, exchange);
    else walk(p, block * ROWS, blocks * ROWS, rank, sums, exchange);
    if constexpr (SEGMENT_SUMS > 0) next_may_begin();
    if constexpr (SUMS > 0) {
        next_may_begin();
        store_sums(p, begin(p, 0, rank), sums, block);
    }
    if constexpr (TOTALS > 0) add_up_rows(p);
}
