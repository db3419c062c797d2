/* Back to images: of those places that are `at` apart from a multiple of the stride, a convolution of what was sent
   with the weights that reach them, turned round. */

/* The weights that reach a place, first and last and every how many; along rows or columns. */
typedef struct {
    int64_t first, step, count;
} reaching;

static reaching reaching_to(const shape *s, int i, int64_t at) {
    reaching found = {-1, s->stride[i], 0};
    for (int64_t k = 0, last = -1; k < s->window[i]; k++)
        if ((at + s->padding[i] - s->dilation[i] * k) % s->stride[i] == 0) {
            if (found.count++) found.step = k - last;
            else found.first = k;
            last = k;
        }
    return found;
}

/* The convolution that leads back to places `at` apart from a multiple of the stride. */
static shape leading_back(const shape *s, const reaching *taps, const int64_t *at) {
    shape back = *s;
    back.channels = s->filters, back.filters = s->channels;
    for (int i = 0; i < 2; i++) {
        const int64_t last = taps[i].first + (taps[i].count - 1) * taps[i].step;
        back.in[i] = s->out[i], back.out[i] = (s->in[i] - at[i] + s->stride[i] - 1) / s->stride[i];
        back.window[i] = taps[i].count, back.stride[i] = 1;
        back.dilation[i] = s->dilation[i] * taps[i].step / s->stride[i];
        back.padding[i] = (s->dilation[i] * last - at[i] - s->padding[i]) / s->stride[i];
    }
    back.x_model = s->y_model, back.x_sample = s->y_sample;
    back.y_model = s->x_model, back.y_sample = s->x_sample;
    back.away = s->away && s->stride[0] == 1 && s->stride[1] == 1;
    return back;
}

/* Filters [filters][channels][window] as [channels][filters][those that reach a place, the last first]. */
static void turn_filters(const float *w, const shape *s, const reaching *taps, float *to) {
    const int64_t window = s->window[0] * s->window[1];
    if (window == 1) {
        transpose(w, s->filters, s->channels, s->channels, to, s->filters);
        return;
    }
    const int64_t down = taps[0].step * s->window[1], right = taps[1].step;
    for (int64_t c = 0; c < s->channels; c++)
        for (int64_t o = 0; o < s->filters; o++) {
            const float *row = w + (o * s->channels + c) * window + taps[0].first * s->window[1] + taps[1].first;
            for (int64_t i = taps[0].count; i-- > 0;)
                for (int64_t j = taps[1].count; j-- > 0;) *to++ = row[i * down + j * right];
        }
}

/* Results, or where there are none the shifts, to every s-th place. */
static void spread(const shape *s, const int64_t *at, const float *found, const float *shift, float *to) {
    for (int64_t c = 0; c < s->channels; c++)
        for (int64_t i = at[0]; i < s->in[0]; i += s->stride[0])
            for (int64_t j = at[1]; j < s->in[1]; j += s->stride[1])
                to[(c * s->in[0] + i) * s->in[1] + j] = found ? *found++ : shift ? shift[c] : 0.0f;
}

/* The places `at` apart from a multiple of the stride, which none or several weights reach. */
typedef struct {
    plan p;
    reaching taps[2];
    int64_t at[2];
    int any;
} phase;

/* What serves all models of a call that leads back. */
typedef struct {
    phase *every;
    int64_t count;
    float *turned, *found;
} way_back;

static way_back prepare_back(const shape *s, char **room, int real) {
    const int apart = s->stride[0] > 1 || s->stride[1] > 1;
    const int64_t high = least(s->stride[0], s->in[0]), broad = least(s->stride[1], s->in[1]);
    const int64_t weights = s->filters * s->channels * s->window[0] * s->window[1];
    way_back found = {taken(room, high * broad * (int64_t)sizeof(phase)), high * broad, taken(room, weights * 4), 0};
    if (apart) found.found = taken(room, s->channels * s->in[0] * s->in[1] * 4);
    for (int64_t k = 0; k < found.count; k++) {
        phase one = {0};
        one.at[0] = k / broad, one.at[1] = k % broad;
        for (int i = 0; i < 2; i++) one.taps[i] = reaching_to(s, i, one.at[i]);
        one.any = one.taps[0].count && one.taps[1].count;
        if (one.any) {
            const shape back = leading_back(s, one.taps, one.at);
            prepare(&one.p, &back, room, real);
        }
        if (real) found.every[k] = one;
    }
    return found;
}

/* One model's images; and the call of what comes after. */
static void send_back(
    const shape *s, const way_back *back, const float *sent, const float *after, const float *w, const float *shift,
    float *x
) {
    for (int64_t k = 0; k < back->count; k++) {
        const phase *one = back->every + k;
        if (one->any) turn_filters(w, s, one->taps, back->turned);
        for (int64_t n = 0; n < s->samples; n++) {
            const float *above = sent + n * s->y_sample, *next = n + 1 < s->samples ? above + s->y_sample : after;
            float *to = x + n * s->x_sample, *found = one->any ? back->found : 0;
            if (one->any) one_image(&one->p, above, next, back->turned, shift, found ? found : to);
            if (back->found) spread(s, one->at, found, shift, to);
        }
    }
}

/* The transposed convolution, which is the gradient of x from that of y, and shifts added for each channel; without
   room, the bytes of it that are needed. */
int64_t laconic_convolve_transposed(
    const float *sent, const float *w, const float *shift, float *x, const shape *s, int64_t models, char *room
) {
    char *begin = room;
    const way_back back = prepare_back(s, &room, begin != 0);
    if (!begin) return room - begin;
    const int64_t weights = s->filters * s->channels * s->window[0] * s->window[1];
    for (int64_t b = 0; b < models; b++)
        send_back(
            s, &back, sent + b * s->y_model, b + 1 < models ? sent + (b + 1) * s->y_model : 0, w + b * weights,
            shift ? shift + b * s->channels : 0, x + b * s->x_model
        );
    settle();
    return 0;
}
