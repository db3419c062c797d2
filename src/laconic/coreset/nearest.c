/* Gains of facility location from the points themselves: distances, rounding, gains and their sums in one pass.

   Points lie in panels, [panels][features][LANES], so that one load brings one feature of LANES points. Every squared
   distance is a sum of squared differences in the order of the features, whatever is computed beside it: what lies
   close together loses no digits, and a pair's distance never depends on the block it was asked for in.

   No distance is above 1. Each is rounded to a multiple of 2^-23: sums of up to 2^30 of them are exact in double, so
   that neither blocks nor threads nor ranks change a gain. */

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define TOGETHER 8
#define PANELS 4
#define BLOCK_FLOATS (1 << 16)
#define MOST_THREADS 64
#define WORTH_A_THREAD (1 << 20)

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* From squared distances to rounded ones, in place. */
static inline __attribute__((always_inline)) void finish(float *squares, int count) {
#pragma omp simd
    for (int i = 0; i < count; i++) {
        float distance = (sqrtf(squares[i]) + 1.0f) - 1.0f;
        squares[i] = distance > 1.0f ? 1.0f : distance;
    }
}

static inline __attribute__((always_inline)) void measure(
    const float *panel, const float *candidates, int64_t features, int count, lanes *squares) {
    for (int c = 0; c < count; c++) squares[c] = (lanes){};
    for (int64_t k = 0; k < features; k++) {
        lanes x = *(const lanes *)(panel + k * LANES);
        for (int c = 0; c < count; c++) {
            lanes gap = x - candidates[c * features + k];
            squares[c] += gap * gap;
        }
    }
}

/* Some of the panels, and what is to be done with them. */
typedef struct {
    const float *points, *candidates;
    float *near;
    const float *later;
    int32_t *nearest, position;
    int64_t panels, features, count;
    double *sums, *later_sums;
} work;

static inline __attribute__((always_inline)) void add(const float *near, const float *distances, double *total) {
#pragma omp simd
    for (int lane = 0; lane < LANES; lane++) {
        float gain = near[lane] - distances[lane];
        total[lane] += gain > 0.0f ? gain : 0.0f;
    }
}

/* sums[c] = sum over the points of max(0, near - distance to candidate c); later_sums the same with `later`, if any. */
static void *add_gains(void *given) {
    const work *w = given;
    int64_t block = BLOCK_FLOATS / (w->features * LANES) + 1;
    for (int64_t c = 0; c < w->count; c++) w->sums[c] = 0;
    for (int64_t c = 0; w->later && c < w->count; c++) w->later_sums[c] = 0;
    for (int64_t from = 0; from < w->panels; from += block) {
        int64_t to = from + block < w->panels ? from + block : w->panels;
        for (int64_t first = 0; first < w->count; first += TOGETHER) {
            const float *candidates = w->candidates + first * w->features;
            double total[TOGETHER][LANES] = {}, later[TOGETHER][LANES] = {};
            for (int64_t p = from; p < to; p++) {
                float apart[TOGETHER][LANES] __attribute__((aligned(4 * LANES)));
                measure(w->points + p * w->features * LANES, candidates, w->features, TOGETHER, (lanes *)apart);
                finish(apart[0], TOGETHER * LANES);
                for (int c = 0; c < TOGETHER; c++) {
                    add(w->near + p * LANES, apart[c], total[c]);
                    if (w->later) add(w->later + p * LANES, apart[c], later[c]);
                }
            }
            for (int c = 0; c < TOGETHER; c++)
                for (int lane = 0; lane < LANES; lane++) {
                    w->sums[first + c] += total[c][lane];
                    if (w->later) w->later_sums[first + c] += later[c][lane];
                }
        }
    }
    return NULL;
}

/* near = min(near, distance to the candidate); whoever is nearer now is represented by `position`. */
static void *take(void *given) {
    const work *w = given;
    for (int64_t first = 0; first < w->panels; first += PANELS) {
        int64_t width = w->features * LANES, most = w->panels - 1;
        float squares[PANELS][LANES] __attribute__((aligned(4 * LANES))) = {};
        for (int64_t k = 0; k < w->features; k++)
            for (int p = 0; p < PANELS; p++) {
                int64_t panel = first + p < most ? first + p : most;
                lanes gap = *(const lanes *)(w->points + panel * width + k * LANES) - w->candidates[k];
                *(lanes *)squares[p] += gap * gap;
            }
        finish(squares[0], PANELS * LANES);
        for (int p = 0; p < PANELS && first + p < w->panels; p++) {
            float *near = w->near + (first + p) * LANES;
            int32_t *nearest = w->nearest + (first + p) * LANES;
#pragma omp simd
            for (int lane = 0; lane < LANES; lane++) {
                float distance = squares[p][lane];
                nearest[lane] = distance < near[lane] ? w->position : nearest[lane];
                near[lane] = distance < near[lane] ? distance : near[lane];
            }
        }
    }
    return NULL;
}

/* The work in as many parts as there are threads; a part whose thread cannot be started is done here. */
static void share(void *(*task)(void *), work whole, double *sums, int64_t threads) {
    work parts[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    int running[MOST_THREADS] = {0};
    for (int64_t t = 0; t < threads; t++) {
        int64_t from = whole.panels * t / threads, to = whole.panels * (t + 1) / threads;
        parts[t] = whole;
        parts[t].points += from * whole.features * LANES;
        parts[t].near += from * LANES;
        if (whole.later) parts[t].later += from * LANES;
        if (whole.nearest) parts[t].nearest += from * LANES;
        parts[t].panels = to - from;
        if (sums) parts[t].sums = sums + t * whole.count;
        if (whole.later) parts[t].later_sums = sums + (threads + t) * whole.count;
        if (t) running[t] = pthread_create(&started[t], NULL, task, &parts[t]) == 0;
    }
    for (int64_t t = 0; t < threads; t++)
        if (!running[t]) task(&parts[t]);
    for (int64_t t = 1; t < threads; t++)
        if (running[t]) pthread_join(started[t], NULL);
}

/* How many threads so many numbers are worth. */
static int64_t threads_for(int64_t numbers, int64_t most) {
    int64_t worth = numbers / WORTH_A_THREAD;
    return worth < 1 ? 1 : worth < most ? worth : most;
}

/* sums: room for [threads][count], and for as much again where there is a `later`; the first of them, as many as are
   returned, are to be added up, then as many for `later`. candidates: [count][features], count a multiple of TOGETHER.
   What fills up the last panel has near = 0 and gains nothing. */
int64_t laconic_gains(const float *points, float *near, const float *later, int64_t panels, int64_t features,
                      const float *candidates, int64_t count, double *sums, int64_t threads) {
    work whole = {.points = points, .candidates = candidates, .near = near, .later = later, .panels = panels,
                  .features = features, .count = count};
    int64_t used = threads_for(count * panels * features * LANES, threads);
    share(add_gains, whole, sums, used);
    return used;
}

void laconic_take(const float *points, float *near, int32_t *nearest, int64_t panels, int64_t features,
                  const float *candidate, int32_t position, int64_t threads) {
    work whole = {.points = points, .candidates = candidate, .near = near, .nearest = nearest, .position = position,
                  .panels = panels, .features = features};
    share(take, whole, NULL, threads_for(panels * features * LANES, threads));
}

/* Lazy greedy. A heap of candidates, the one of the highest bound first, of equal ones the smallest number. */
typedef struct {
    int64_t *ids, size;
    double *bounds;
} heap;

static int before(const heap *h, int64_t a, int64_t b) {
    return h->bounds[a] > h->bounds[b] || (h->bounds[a] == h->bounds[b] && a < b);
}

static void push(heap *h, int64_t id) {
    int64_t place = h->size++;
    for (; place && before(h, id, h->ids[(place - 1) / 2]); place = (place - 1) / 2)
        h->ids[place] = h->ids[(place - 1) / 2];
    h->ids[place] = id;
}

static int64_t pop(heap *h) {
    int64_t first = h->ids[0], last = h->ids[--h->size], place = 0;
    for (int64_t child; (child = 2 * place + 1) < h->size; place = child) {
        if (child + 1 < h->size && before(h, h->ids[child + 1], h->ids[child])) child++;
        if (!before(h, h->ids[child], last)) break;
        h->ids[place] = h->ids[child];
    }
    h->ids[place] = last;
    return first;
}

static void copy_row(const float *points, int64_t features, int64_t point, float *row) {
    const float *panel = points + point / LANES * features * LANES + point % LANES;
    for (int64_t k = 0; k < features; k++) row[k] = panel[k * LANES];
}

/* The candidate that gains most, taken out of the heap; gains are asked for in blocks, each up to twice the last. */
static int64_t settle(heap *h, work whole, int64_t block, int64_t widest, float *rows, double *sums, int64_t *asked,
                      int64_t most_threads) {
    int64_t count = 0, best = -1;
    for (int64_t width = block;; width = 2 * width < widest ? 2 * width : widest) {
        int64_t first = count;
        while (count - first < width && h->size && (best < 0 || before(h, h->ids[0], best))) asked[count++] = pop(h);
        if (count == first) break;
        whole.count = (count - first + TOGETHER - 1) / TOGETHER * TOGETHER;
        for (int64_t c = first; c < count; c++)
            copy_row(whole.points, whole.features, asked[c], rows + (c - first) * whole.features);
        int64_t threads = threads_for(whole.count * whole.panels * whole.features * LANES, most_threads);
        whole.candidates = rows;
        share(add_gains, whole, sums, threads);
        for (int64_t c = first; c < count; c++) {
            double gain = 0;
            for (int64_t t = 0; t < threads; t++) gain += sums[t * whole.count + c - first];
            h->bounds[asked[c]] = gain;
            if (best < 0 || before(h, asked[c], best)) best = asked[c];
        }
    }
    for (int64_t c = 0; c < count; c++)
        if (asked[c] != best) push(h, asked[c]);
    return best;
}

/* So many more picks, or fewer if the cost comes to `enough` or candidates run out; returns how many. `ids` is a heap
   of `*size` candidates by `bounds`, `asked` has room for as many. `rows` has room for [widest][features], `sums` for
   [threads][widest]; block and widest are multiples of TOGETHER. */
int64_t laconic_lazy(const float *points, float *near, int32_t *nearest, int64_t panels, int64_t features, int64_t *ids,
                     int64_t *size, double *bounds, int64_t *asked, float *rows, double *sums, int64_t block,
                     int64_t widest, int32_t position, int64_t picks, double *cost, double enough, int64_t *picked,
                     double *gains, int64_t threads) {
    heap h = {.ids = ids, .size = *size, .bounds = bounds};
    work whole = {.points = points, .near = near, .panels = panels, .features = features};
    int64_t done = 0;
    for (; done < picks && h.size && !(position + done > 0 && *cost <= enough); done++) {
        int64_t best = settle(&h, whole, block, widest, rows, sums, asked, threads);
        copy_row(points, features, best, rows);
        laconic_take(points, near, nearest, panels, features, rows, position + (int32_t)done, threads);
        near[best] = 0;
        nearest[best] = position + (int32_t)done;
        picked[done] = best;
        gains[done] = bounds[best];
        *cost -= bounds[best];
    }
    *size = h.size;
    return done;
}

/* Points in a panel, candidates at a time, and threads at most. */
int64_t laconic_lanes(void) { return LANES; }
int64_t laconic_together(void) { return TOGETHER; }
int64_t laconic_most_threads(void) { return MOST_THREADS; }
