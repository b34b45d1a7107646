// Panels of 32 columns of a weight, and tiles of rows of x: what the kernels of linear layers share.
#pragma once

#include "simd.h"

#define PANEL 32
#define COLUMNS (PANEL / LANES)  // vectors of a panel
#define ROWS (3 * REGISTERS / 4 / COLUMNS)  // of a tile at most: their sums fit in registers. 12, 3 or 1
#define ROW_BLOCK 192    // rows whose x stays in L2 while the panels pass
#define PREFETCH_ROWS 6  // with fewer rows memory is the limit, and only some CPUs gain by a prefetch

// y = sums + bias, [M, N].
struct output {
    char *y;
    ptrdiff_t stride;   // bytes from row to row
    const float *bias;  // [N] or null
    int64_t num_columns;
    int is_bf16;
};

INLINE int64_t num_panels_of(int64_t num_columns) { return (num_columns + PANEL - 1) / PANEL; }

// Returns the first row of a tile of a block, and sets the number of tiles. Tile `num_tiles` begins where the block
// ends. Tiles have nearly equal heights: 14 rows are 7 + 7, never 12 + 2.
INLINE int64_t tile_begin(int64_t num_rows, int64_t tile, int64_t *num_tiles) {
    *num_tiles = (num_rows + ROWS - 1) / ROWS;
    return tile * (num_rows / *num_tiles) + MIN(tile, num_rows % *num_tiles);
}

// A row within its tile.
struct place {
    int64_t tile_begin, tile_rows, row;  // row: within the tile
};

INLINE struct place place_of(int64_t num_rows, int64_t row) {
    int64_t num_tiles, tile = 0;
    while (tile_begin(num_rows, tile + 1, &num_tiles) <= row) tile++;
    int64_t begin = tile_begin(num_rows, tile, &num_tiles), end = tile_begin(num_rows, tile + 1, &num_tiles);
    return (struct place){begin, end - begin, row - begin};
}

// Runs `call` with n = rows, known to the compiler; no code is made for more than ROWS.
#define IF_ROWS(n, count, call) \
    case count: { enum { n = count <= ROWS ? count : 1 }; if (count <= ROWS) { call; } } break;
#define WITH_ROWS(n, rows, call)                                                          \
    switch (rows) {                                                                       \
        IF_ROWS(n, 1, call) IF_ROWS(n, 2, call) IF_ROWS(n, 3, call) IF_ROWS(n, 4, call)    \
        IF_ROWS(n, 5, call) IF_ROWS(n, 6, call) IF_ROWS(n, 7, call) IF_ROWS(n, 8, call)    \
        IF_ROWS(n, 9, call) IF_ROWS(n, 10, call) IF_ROWS(n, 11, call) IF_ROWS(n, 12, call) \
    }

// Writes one row's sums of one vector of a panel.
INLINE void store_sums(const struct output *out, int64_t row, int64_t column, f32s sum) {
    char *y = out->y + row * out->stride;
    int64_t width = MIN(out->num_columns - column, LANES);
    if (width <= 0) return;
    if (out->bias) {
        float bias[LANES] = {0};
        memcpy(bias, out->bias + column, width * sizeof(float));
        sum = sum + load_f32(bias);
    }
    store_some(y, column, sum, width, out->is_bf16);
}
