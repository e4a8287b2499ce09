# %% [markdown]
# # An anomaly detector, taken to a C file
#
# Forty machines vibrate, each in its own way. Together they learn what is normal,
# without a single label. Then the model leaves Python, as a C file that decides whether
# a window of readings is normal. It is compiled and run here.
#
# Download this page as a notebook: <a href="detector.ipynb">detector.ipynb</a>.
#
# ## Learn what is normal
#
# `machines` is a synthetic data set: windows of three channels and 32 readings.
# Training windows are normal. A third of the test windows has a fault: knocks, another
# speed, or wear. The network reproduces a window through a narrow layer, and what it
# reproduces badly is not normal: **the anomaly score of a window is its loss**.

# %%
import shutil
import subprocess
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from torch import nn

import cbdsl
from cbdsl.data import load
from cbdsl.export.write import write

folder = Path(tempfile.mkdtemp())
data = load("machines")
windows, faulty = data.scaling.invert(data.test.features), data.test.labels == 1


def net():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(96, 48),
        nn.ReLU(),
        nn.Linear(48, 12),
        nn.ReLU(),
        nn.Linear(12, 48),
        nn.ReLU(),
        nn.Linear(48, 96),
    )


spec = cbdsl.preset("anomaly").with_settings({"rounds": 15})
result = cbdsl.run(spec, data=data, model=net, out=folder / "run")
for name, value in result.summary.metrics.items():
    print(f"{name:<10} {value:.3f}")

# %% [markdown]
# ## A threshold from the hold-out
#
# The server's hold-out is normal, and no model was trained on it. The threshold is the
# score that one in a hundred of its windows exceeds (`options.detection.false_alarm`).
# It is saved with the model.

# %%
scores = result.anomaly_scores(windows)
threshold = result.card.threshold
print(f"threshold {threshold:.3f}")
print(f"false alarms {np.mean(scores[~faulty] > threshold):.1%}")
print(f"detected {np.mean(scores[faulty] > threshold):.1%}")

# %% [markdown]
# ## To C
#
# `cbdsl export runs/mine --to c --out model.c` does the same as `write`: one C file
# without allocations, and a header with sizes and functions. The scaling of the
# readings and the threshold are inside.

# %%
note = write(cbdsl.load(folder / "run"), "c", folder / "model.c")
print(note)
header = (folder / "model.h").read_text()
print(header[header.index("enum") : header.index("#ifdef", header.index("enum"))])

# %% [markdown]
# A program on the machine needs little more than this. It prints one verdict per
# window.

# %%
MAIN = """
#include "model.h"
#include <stdio.h>

int main(void)
{
    static float window[PREDICT_INPUTS], made[PREDICT_OUTPUTS];
    while (fread(window, sizeof(float), PREDICT_INPUTS, stdin) == PREDICT_INPUTS) {
        predict(window, made);
        printf("%d %g\\n", predict_anomaly(window, made), predict_score(window, made));
    }
    return 0;
}
"""
(folder / "main.c").write_text(MAIN)
compiler = shutil.which("cc")
if compiler is None:
    print("no C compiler here")
else:
    words = [compiler, "-std=c99", "-O2", "main.c", "model.c", "-o", "detect", "-lm"]
    subprocess.run(words, cwd=folder, check=True)
    readings = windows.astype(np.float32).tobytes()
    told = subprocess.run(
        [folder / "detect"], input=readings, capture_output=True, check=True
    ).stdout
    verdicts = np.array([line.split()[0] == b"1" for line in told.splitlines()])
    print(
        f"{len(verdicts):,} verdicts, {(verdicts != (scores > threshold)).sum()} differ"
    )
    print(f"{(folder / 'detect').stat().st_size / 1e3:.0f} kB program")

# %% [markdown]
# ## Normal windows, and faults
#
# Above are the scores of normal windows and of windows with a fault. Below is the
# window with the highest score, and its reconstruction.

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6.4))
bins = np.linspace(0, np.quantile(scores, 0.995), 60)
above.hist(scores[~faulty], bins, color="#0072b2", alpha=0.8, label="normal")
above.hist(scores[faulty], bins, color="#d55e00", alpha=0.7, label="with a fault")
above.axvline(threshold, color="#222222", linestyle="--", label="threshold")
above.set(xlabel="anomaly score", ylabel="windows")
above.set_title("What the network cannot reproduce is not normal")
above.legend()
worst = int(np.argmax(scores))
made = result.predict(windows[worst : worst + 1]).reshape(3, 32)
for channel, colour in enumerate(("#0072b2", "#009e73", "#cc79a7")):
    below.plot(windows[worst, channel], color=colour)
    below.plot(made[channel], "--", color=colour, alpha=0.7)
below.set(xlabel="reading", ylabel="vibration")
below.set_title("The most abnormal window, and its reconstruction (dashed)")
shutil.rmtree(folder)

# %% [markdown]
# Devices have the same model when a run ends (`cbdsl work`), without a threshold: only
# the server has a hold-out. `--int8` writes weights of eight bits and prints what that
# costs. [Export](../export.md) has the sizes of other networks.
