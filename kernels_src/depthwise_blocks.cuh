// What blocks of depthwise convolutions do whose rows come by way of shared memory: tiles of `beside` strips side by
// side, in bands of lines, which are chunks of rows of an image. Builds on depthwise_copies.cuh, and on STEPS of a turn,
// each of ROWS_IN rows of the source and ROWS_OUT of the result, BEFORE of which precede the first result.

// Rows of an image: the first ones of source and result (of which BEFORE are not its own), how many units are finished.
struct Lines {
    int row, result_row, left;
    unsigned image;
};

__device__ __forceinline__ Lines lines_of(const Params& p, unsigned lines) {
    const bool any = lines < p.lines;
    const int unit = digit(lines, p.chunks) * p.chunk, residue = digit(lines, p.residues_h);
    return {unit * ROWS_IN * p.dilation_h + p.source_top + residue,
            (unit - BEFORE) * ROWS_OUT * p.dilation_h + p.result_top + residue, any ? min(p.chunk, p.units - unit) : 0,
            lines};
}

// A block: its channels from `first` on, its first strip, residue of columns, the first of its bands' lines; the rows
// of partial sums are by `group`.
struct Task {
    int first, strip, residue;
    unsigned lines, group;

    __device__ __forceinline__ explicit Task(const Params& p) {
        group = blockIdx.x;
        first = digit(group, p.slices) * CHANNELS;
        unsigned rest = group;
        strip = digit(rest, p.tiles) * p.beside.value;
        residue = digit(rest, p.residues_w);
        lines = rest * p.bands;
    }
    __device__ __forceinline__ int source_column(const Params& p) const {
        return strip * p.pitch * p.dilation_w + p.source_left + residue;
    }
    __device__ __forceinline__ int result_column(const Params& p, int beside) const {
        return (strip + beside) * COLUMNS * p.dilation_w + p.result_left + residue;
    }
    // Of the longest band.
    __device__ __forceinline__ int turns(const Params& p) const {
        const int most = p.bands > 1 ? p.chunk : lines_of(p, lines).left;
        return (most + BEFORE + STEPS - 1) / STEPS;
    }
};

// A thread: its channels from `channel` on, of a strip of a band; steps in all, none where there is no such channel.
struct Strip {
    int channel, band, beside, steps;
    Lines lines;

    __device__ __forceinline__ Strip(const Params& p, const Task& task) {
        const int slot = threadIdx.x / LANES;
        channel = task.first + threadIdx.x % LANES * VEC;
        band = p.beside.divide(slot);
        beside = slot - band * p.beside.value;
        lines = lines_of(p, task.lines + band);
        steps = channel < p.channels ? lines.left + BEFORE : 0;
    }
    // Bytes into a row of pixels, `band_pixels` of each band, `pitch` between strips.
    __device__ __forceinline__ int at(int band_pixels, int pitch) const {
        return (band * band_pixels + beside * pitch) * PIXEL
               + static_cast<int>(threadIdx.x % LANES * VEC * sizeof(scalar_t));
    }
};

// Rows of a band of the source, and of the other image that is read: as many as its own units.
__device__ __forceinline__ Rows source_rows(const Params& p, const Task& task, int band) {
    const Lines lines = lines_of(p, task.lines + band);
    return {lines.image, lines.row, lines.left > 0 ? p.source_rows : 0};
}
__device__ __forceinline__ Rows other_rows(const Params& p, const Task& task, int band) {
    const Lines lines = lines_of(p, task.lines + band);
    const int begin = lines.result_row + BEFORE * ROWS_OUT * p.dilation_h;
    return {lines.image, begin, min(p.result_rows, begin + lines.left * ROWS_OUT * p.dilation_h)};
}
