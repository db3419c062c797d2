/* Steps of adaptive optimizers. Where the variance stays, one reading makes directions of momenta and tells how far to
   go, and a second one goes.

   Sums of squares have the order of trees. What a strip reads lies at `momentum`, `before` and so on; that of the last
   one, which may be short, in room of its own. */

typedef struct {
    const float *frozen, *x;
    float *momentum, *before, *fresh;
} sight;

typedef struct {
    float keep, remember, take, floor, decay;
} habits;

typedef struct {
    floats largest;
    words odd;
} peak;

#if defined(__AVX512F__) && !defined(THINWIRE_PORTABLE)
INLINE floats roots_of(floats x) { return (floats)_mm512_sqrt_ps((__m512)x); }
#elif defined(__AVX2__) && !defined(THINWIRE_PORTABLE)
INLINE floats roots_of(floats x) {
    __m256 halves[2];
    memcpy(halves, &x, 64);
    for (int half = 0; half < 2; half++) halves[half] = _mm256_sqrt_ps(halves[half]);
    memcpy(&x, halves, 64);
    return x;
}
#else
INLINE floats roots_of(floats x) {
    for (int lane = 0; lane < LANES; lane++) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
}
#endif

/* The ratios of a strip, whose lanes from `count` on are none; NaN is remembered apart, as no maximum keeps it. */
INLINE void rise(peak *top, floats ratio, int64_t count) {
    for (int64_t lane = count; lane < LANES; lane++) ratio[lane] = 0;
    top->largest = upper(ratio, top->largest);
    top->odd |= (words)(ratio != ratio);
}

static float peak_of(const peak *top) {
    float largest = 0;
    uint32_t odd = 0;
    for (int lane = 0; lane < LANES; lane++) {
        largest = top->largest[lane] > largest ? top->largest[lane] : largest;
        odd |= top->odd[lane];
    }
    return odd ? __builtin_nanf("") : largest;
}

/* One strip: its direction without decay, squared, is returned, and with decay, squared, left in `whole`. */
INLINE floats turn(const sight *at, int64_t i, int64_t count, habits by, peak *top, floats *whole) {
    floats m = load(at->momentum + i), way = m - by.keep * load(at->before + i);
    floats fresh = by.remember * load(at->fresh + i) + by.take * (way * way);
    floats spread = roots_of(load(at->frozen + i)) + by.floor, u = m / spread;
    floats square = u * u;
    rise(top, spread / (roots_of(fresh) + by.floor), count);
    if (at->x) {
        u = u + by.decay * load(at->x + i);
        *whole = u * u;
    }
    store(at->before + i, m);
    store(at->fresh + i, fresh);
    store(at->momentum + i, u);
    return square;
}

INLINE floats neighbours(const floats *row) {
    return ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7]));
}

/* The last strip, of fewer than sixteen. */
static floats turn_some(const sight *at, int64_t i, int64_t n, habits by, peak *top, floats *whole) {
    float room[5][LANES] = {{0}};
    const float *from[5] = {at->frozen, at->x, at->momentum, at->before, at->fresh};
    size_t nbytes = (size_t)(n - i) * sizeof(float);
    for (int k = 0; k < 5; k++)
        if (from[k]) memcpy(room[k], from[k] + i, nbytes);
    sight apart = {room[0], at->x ? room[1] : 0, room[2], room[3], room[4]};
    floats square = turn(&apart, 0, n - i, by, top, whole);
    memcpy(at->momentum + i, room[2], nbytes);
    memcpy(at->before + i, room[3], nbytes);
    memcpy(at->fresh + i, room[4], nbytes);
    return square;
}

INLINE void turn_all(const sight *at, int64_t n, habits by, float *found) {
    peak top = {{0}, {0}};
    tree plain = {.held = 0}, whole = {.held = 0};
    floats first[8], second[8] = {{0}};
    int64_t i = 0;
    for (; i + 8 * LANES <= n; i += 8 * LANES) {
        for (int k = 0; k < 8; k++) first[k] = turn(at, i + k * LANES, LANES, by, &top, second + k);
        if (!at->x) continue;
        tree_add(&plain, neighbours(first), 3);
        tree_add(&whole, neighbours(second), 3);
    }
    for (; i < n; i += LANES) {
        *first = i + LANES <= n ? turn(at, i, LANES, by, &top, second) : turn_some(at, i, n, by, &top, second);
        tree_add(&plain, *first, 0);
        tree_add(&whole, *second, 0);
    }
    found[0] = peak_of(&top);
    found[1] = at->x ? tree_total(&plain) : 0;
    found[2] = at->x ? tree_total(&whole) : 0;
}

/* Without decay x is absent, and the sums are not made. */
void thinwire_turn(
    float *momentum, float *before, const float *frozen, float *fresh, const float *x, int64_t n, const float *numbers,
    float *found
) {
    sight with = {frozen, x, momentum, before, fresh}, without = {frozen, 0, momentum, before, fresh};
    habits by;
    memcpy(&by, numbers, sizeof by);
    if (x) turn_all(&with, n, by, found);
    else turn_all(&without, n, by, found);
}

void thinwire_descend(float *restrict x, const float *restrict direction, int64_t n, float ratio, float rate) {
    for (int64_t i = 0; i < n; i++) x[i] = x[i] - rate * (ratio * direction[i]);
}

/* All in one reading, where every tensor goes equally far. */
void thinwire_adam_descend(
    float *x, float *before, const float *momentum, const float *frozen, int64_t n, float floor, float decay, float rate
) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        floats m = load(momentum + i), place = load(x + i), u = m / (roots_of(load(frozen + i)) + floor);
        if (decay != 0) u = u + decay * place;
        store(before + i, m);
        store(x + i, place - rate * u);
    }
    for (; i < n; i++) {
        float u = momentum[i] / (__builtin_sqrtf(frozen[i]) + floor);
        if (decay != 0) u = u + decay * x[i];
        before[i] = momentum[i];
        x[i] = x[i] - rate * u;
    }
}
