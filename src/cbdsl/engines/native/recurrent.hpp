// GRU and LSTM with samples in the lanes, forwards and backwards through time.
//
// A step of time is a row of the input. Every number of a state is one chain of additions in the order of what it reads, so
// neither blocks nor lanes change it. While a network is scored, each step overwrites what the one before it kept.
#pragma once

#include <algorithm>

#include "activation.hpp"

namespace cbdsl {

// output[o] += the sum over i of matrix[o][i] * input[i]. TURNED: of matrix[i][o]. row: numbers of a row of the matrix.
template <bool TURNED>
inline void add_product(const float *matrix, size_t row, int outputs, int inputs, const lanes *input, lanes *output) {
    in_blocks<12>(outputs, [&](auto size, int first) {
        constexpr int OUTPUTS = decltype(size)::value;
        const float *corner = matrix + first * (TURNED ? 1 : row);
        lanes accumulator[OUTPUTS];
#pragma GCC unroll 12
        for (int o = 0; o < OUTPUTS; o++) accumulator[o] = output[first + o];
        for (int i = 0; i < inputs; i++) {
            const lanes value = input[i];
#pragma GCC unroll 12
            for (int o = 0; o < OUTPUTS; o++) accumulator[o] += corner[TURNED ? i * row + o : o * row + i] * value;
        }
#pragma GCC unroll 12
        for (int o = 0; o < OUTPUTS; o++) output[first + o] = accumulator[o];
    });
}

// Numbers of all steps of time: those of one step lie side by side.
struct Track {
    lanes *at = nullptr;
    size_t step = 0;

    lanes *operator[](int t) const { return at + size_t(t) * step; }
};

// The gradient of a matrix (rows, columns) that begins at `start`: the sum over time and samples of left times right.
inline void add_outer(size_t start, int rows, int columns, int steps, Track left, Track right, const Sink &sink) {
    in_blocks<MANY_REGISTERS ? 6 : 3>(rows, [&](auto height, int row) {
        constexpr int ROWS = decltype(height)::value;
        in_blocks<4>(columns, [&](auto width, int column) {
            constexpr int COLUMNS = decltype(width)::value;
            lanes accumulator[ROWS][4]{};
            const lanes *from = left.at + row, *value = right.at + column;
            for (int t = 0; t < steps; t++, from += left.step, value += right.step)
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                    for (int c = 0; c < COLUMNS; c++) accumulator[r][c] += from[r] * value[c];
            for (int r = 0; r < ROWS; r++) {
                const quad sums = sum_each(accumulator[r][0], accumulator[r][1], accumulator[r][2], accumulator[r][3]);
                for (int c = 0; c < COLUMNS; c++) sink.add(start + size_t(row + r) * columns + column + c, sums[c]);
            }
        });
    });
}

// The gradient of a bias: the sum over time and samples.
inline void add_total(size_t start, int count, int steps, Track from, const Sink &sink) {
    for (int i = 0; i < count; i++)
        sink.add(start + i, sum(sum_row(size_t(steps), [&](size_t t) { return from.at[t * from.step + i]; })));
}

// One step of a GRU. gates: sums of r, z and n, and the part of n that the state gives; then r, z, n and that part.
// Kept out of line, as the other curves: the same instructions bend all states.
__attribute__((noinline)) inline void gru_step(int hidden, lanes *gates, const lanes *before, lanes *after) {
    lanes *r = gates, *z = r + hidden, *n = z + hidden, *own = n + hidden;
    for (int j = 0; j < hidden; j++) {
        r[j] = logistic(r[j]), z[j] = logistic(z[j]);
        n[j] = hyperbolic_tangent(n[j] + r[j] * own[j]);
        after[j] = (before[j] - n[j]) * z[j] + n[j];
    }
}

// state: the gradient of the state after the step, then the part of it that goes straight to the state before. gates: as
// `gru_step` left them, then the gradients of its sums.
inline void gru_step_back(int hidden, lanes *gates, const lanes *before, lanes *state) {
    lanes *r = gates, *z = r + hidden, *n = z + hidden, *own = n + hidden;
    for (int j = 0; j < hidden; j++) {
        const lanes g = state[j], share = r[j], kept = z[j], fresh = n[j];
        const lanes by_n = g * (1.0f - kept) * (1.0f - fresh * fresh);
        r[j] = by_n * own[j] * share * (1.0f - share);
        z[j] = g * (before[j] - fresh) * kept * (1.0f - kept);
        n[j] = by_n, own[j] = by_n * share;
        state[j] = g * kept;
    }
}

// One step of an LSTM. gates: sums of i, f, g and o, then these.
__attribute__((noinline)) inline void lstm_step(int hidden, lanes *gates, const lanes *cell_before, lanes *cell, lanes *tangent,
                                                lanes *after) {
    lanes *i = gates, *f = i + hidden, *g = f + hidden, *o = g + hidden;
    for (int j = 0; j < hidden; j++) {
        i[j] = logistic(i[j]), f[j] = logistic(f[j]), o[j] = logistic(o[j]);
        g[j] = hyperbolic_tangent(g[j]);
        cell[j] = f[j] * cell_before[j] + i[j] * g[j];
        tangent[j] = hyperbolic_tangent(cell[j]);
        after[j] = o[j] * tangent[j];
    }
}

// state, cell: the gradients after the step; cell: then that before it. gates: as `lstm_step` left them, then the gradients
// of its sums.
inline void lstm_step_back(int hidden, lanes *gates, const lanes *cell_before, const lanes *tangent, const lanes *state, lanes *cell) {
    lanes *i = gates, *f = i + hidden, *g = f + hidden, *o = g + hidden;
    for (int j = 0; j < hidden; j++) {
        const lanes enters = i[j], stays = f[j], fresh = g[j], leaves = o[j];
        const lanes by_cell = cell[j] + state[j] * leaves * (1.0f - tangent[j] * tangent[j]);
        i[j] = by_cell * fresh * enters * (1.0f - enters);
        f[j] = by_cell * cell_before[j] * stays * (1.0f - stays);
        g[j] = by_cell * enters * (1.0f - fresh * fresh);
        o[j] = state[j] * tangent[j] * leaves * (1.0f - leaves);
        cell[j] = by_cell * stays;
    }
}

// A recurrent stage with its weights and all that it keeps for the way back: inputs, states, gates, cells and their tangents
// of all steps, and two gradients. Steps are an odd number of vectors apart: at a power of two they would take turns in
// few lines of a cache.
class Recurrence {
  public:
    static size_t apart(int vectors) { return size_t(vectors) | 1; }

    // Vectors that a stage keeps.
    static size_t kept(const Stage &stage) {
        const size_t steps = size_t(stage.input.channels) + 1, hidden = apart(stage.hidden);
        return steps * (apart(stage.input.width) + hidden + apart(4 * stage.hidden) + (stage.is_lstm ? 2 * hidden : 0)) + 2 * hidden;
    }

    Recurrence(const Stage &stage, const float *weights, lanes *kept)
        : stage_(stage), hidden_(stage.hidden), inputs_(stage.input.width), steps_(stage.input.channels),
          sums_(stage.is_lstm ? 4 * hidden_ : 3 * hidden_), shared_(stage.is_lstm ? 4 * hidden_ : 2 * hidden_),
          of_input_(weights + stage.weight), of_state_(weights + stage.state_weight),
          bias_(stage.bias == NOWHERE ? nullptr : weights + stage.bias) {
        const auto take = [&](Track &track, int vectors, size_t steps) {
            track = {kept, apart(vectors)};
            kept += track.step * steps;
        };
        const size_t steps = size_t(steps_) + 1;
        take(read_, inputs_, steps), take(states_, hidden_, steps), take(gates_, 4 * hidden_, steps);
        if (stage.is_lstm) take(cells_, hidden_, steps), take(tangents_, hidden_, steps);
        take(slopes_, hidden_, 2);
    }

    void forward(bool training, const lanes *input, lanes *output) {
        std::fill_n(states_.at, hidden_, lanes{});
        if (stage_.is_lstm) std::fill_n(cells_.at, hidden_, lanes{});
        for (int t = 0; t < steps_; t++) {
            const int now = training ? t : 0, then = training ? t + 1 : 0;
            lanes *gates = gates_[now], *after = states_[then];
            std::copy_n(input + stage_.input.at(t, 0), inputs_, read_[now]);
            begin(gates);
            add_product<false>(of_input_, inputs_, sums_, inputs_, read_[now], gates);
            add_product<false>(of_state_, hidden_, shared_, hidden_, states_[now], gates);
            if (stage_.is_lstm) {
                lstm_step(hidden_, gates, cells_[now], cells_[then], tangents_[now], after);
            } else {
                add_product<false>(of_state_ + size_t(shared_) * hidden_, hidden_, hidden_, hidden_, states_[now], gates + sums_);
                gru_step(hidden_, gates, states_[now], after);
            }
            if (!stage_.last || t + 1 == steps_) std::copy_n(after, hidden_, output + (stage_.last ? 0 : stage_.output.at(t, 0)));
        }
    }

    // gradient: null if it is not wanted. The weights are read before the sink, which may be the weights themselves, is
    // written to.
    void backward(const lanes *output_gradient, lanes *gradient, bool adds, const Sink &sink) {
        lanes *state = slopes_[0], *cell = slopes_[1];
        std::fill_n(state, hidden_, lanes{});
        std::fill_n(cell, hidden_, lanes{});
        for (int t = steps_; t-- > 0;) {
            lanes *gates = gates_[t];
            if (!stage_.last || t + 1 == steps_) {
                const lanes *from = output_gradient + (stage_.last ? 0 : stage_.output_gradient.at(t, 0));
                for (int j = 0; j < hidden_; j++) state[j] += from[j];
            }
            if (stage_.is_lstm) {
                lstm_step_back(hidden_, gates, cells_[t], tangents_[t], state, cell);
                std::fill_n(state, hidden_, lanes{});
            } else {
                gru_step_back(hidden_, gates, states_[t], state);
                add_product<true>(of_state_ + size_t(shared_) * hidden_, hidden_, hidden_, hidden_, gates + sums_, state);
            }
            add_product<true>(of_state_, hidden_, hidden_, shared_, gates, state);
            if (!gradient) continue;
            lanes *to = gradient + stage_.input_gradient.at(t, 0);
            if (!adds) std::fill_n(to, inputs_, lanes{});
            add_product<true>(of_input_, inputs_, inputs_, sums_, gates, to);
        }
        const Track own{gates_[0] + sums_, gates_.step};  // of a GRU, the part of n that the state gives
        add_outer(stage_.weight, sums_, inputs_, steps_, gates_, read_, sink);
        add_outer(stage_.state_weight, shared_, hidden_, steps_, gates_, states_, sink);
        if (!stage_.is_lstm) add_outer(stage_.state_weight + size_t(shared_) * hidden_, hidden_, hidden_, steps_, own, states_, sink);
        if (!bias_) return;
        add_total(stage_.bias, sums_, steps_, gates_, sink);
        add_total(stage_.bias + sums_, shared_, steps_, gates_, sink);
        if (!stage_.is_lstm) add_total(stage_.bias + sums_ + shared_, hidden_, steps_, own, sink);
    }

  private:
    // The biases, of inputs first and then of states. Those of a GRU's n stay apart.
    void begin(lanes *gates) const {
        const float *of_state = bias_ ? bias_ + sums_ : nullptr;
        for (int o = 0; o < sums_; o++) gates[o] = splat(bias_ ? (o < shared_ ? bias_[o] + of_state[o] : bias_[o]) : 0.0f);
        for (int o = sums_; o < 4 * hidden_; o++) gates[o] = splat(bias_ ? of_state[o - hidden_] : 0.0f);
    }

    const Stage &stage_;
    const int hidden_, inputs_, steps_;
    const int sums_, shared_;  // rows of the weights, and how many of them add what inputs and states give
    const float *of_input_, *of_state_, *bias_;
    Track read_, states_, gates_, cells_, tangents_, slopes_;  // states and cells begin with those before the first step
};

}  // namespace cbdsl
