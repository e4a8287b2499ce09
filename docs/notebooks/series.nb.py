# %% [markdown]
# # A series to predict
#
# Twelve houses measure their load every hour. A model should predict the next hour,
# also for a house that no worker has seen. No house sends its readings anywhere.
# This page goes from *a series* to *a forecast*, with synthetic series in place of
# yours.
#
# Download this page as a notebook: <a href="series.ipynb">series.ipynb</a>.
#
# ## Series, and windows of them
#
# A house has a base load, a morning and an evening peak at hours of its own, a weekly
# rhythm, and autocorrelated noise. A sample is a window: the last 24 hours. Its target
# is the hour after. In this way any series becomes a regression.

# %%
import matplotlib.pyplot as plt
import numpy as np
from torch import nn

import cbdsl

rng = np.random.default_rng(8)
PAST = 24


def house(days):
    """Return the load of a house in kW, hour by hour, (24 days,)."""
    base, size = rng.uniform(0.2, 0.5), rng.uniform(0.5, 2, 2)
    peaks = rng.normal((7, 19), 1.2)
    weekend, hours = rng.uniform(1.0, 1.5), np.arange(24 * days)
    away = np.abs(hours[:, None] % 24 - peaks)
    bumps = size * np.exp(-((np.minimum(away, 24 - away) / 1.8) ** 2))  # (hours, 2)
    load = base + bumps.sum(1) * np.where(hours // 24 % 7 >= 5, weekend, 1)
    noise = np.zeros(len(hours))
    for hour in range(1, len(hours)):
        noise[hour] = 0.7 * noise[hour - 1] + 0.06 * rng.normal()
    return np.maximum(load + noise, 0)


def windows(load):
    """Return windows (n, 24) of a series, and the hour after each, (n,)."""
    every = np.arange(len(load) - PAST)[:, None] + np.arange(PAST + 1)
    return load[every][:, :PAST], load[every][:, PAST]


houses = [windows(house(21)) for _ in range(12)]
volunteers = [windows(house(21)) for _ in range(3)]
strangers = [windows(house(21)) for _ in range(4)]
print("windows of a house:", houses[0][0].shape, "targets:", houses[0][1].shape)

# %% [markdown]
# ## Who holds what
#
# Each house is a worker, and keeps its windows. Three volunteers gave theirs to the
# server: D_G and the hold-out are drawn from them. The test set is four other houses.
# `task="regression"` scales windows and targets; results are in kW.

# %%
data = cbdsl.Dataset.from_arrays(
    *(np.concatenate(part) for part in zip(*volunteers)),
    *(np.concatenate(part) for part in zip(*strangers)),
    task="regression",
    target_names=("load",),
)
settings = {
    "workers": len(houses),
    "rounds": 20,
    "data.shared_training": 100,
    "data.shared_scoring": 300,
    "data.holdout": 200,
    "local.learning_rate": 0.03,
    "local.momentum": 0.9,
}
rotation = cbdsl.preset("regression").with_settings({**settings, "selection.k": 8})
average = cbdsl.Spec(method="fedavg", shared="train").with_settings(settings)
alone = average.with_settings({"workers": 1, "shared": "none"})


def net():
    return nn.Sequential(nn.Linear(PAST, 24), nn.Tanh(), nn.Linear(24, 1))


def learn(spec, clients):
    return cbdsl.run(spec, data=data, model=net, clients=clients)


rotated = learn(rotation, houses)
averaged = learn(average, houses)
alones = [learn(alone, [one]) for one in houses[:4]]

# %% [markdown]
# ## How far off
#
# Two forecasts need no model: repeat the last reading, or the one 24 hours before.
# The RMSE is in kW, over all hours of the four strangers.

# %%
x, y = (np.concatenate(part) for part in zip(*strangers))


def rmse(made):
    return float(np.sqrt(np.mean((made - y) ** 2)))


print(f"the last reading again:  {rmse(x[:, -1]):.3f} kW")
print(f"the same hour yesterday: {rmse(x[:, 0]):.3f} kW")
each = [one.summary.metrics["rmse"] for one in alones]
print(f"one house alone:         {np.mean(each):.3f} kW, mean of {len(each)}")
for name, result in {"averaged": averaged, "rotation": rotated}.items():
    told = result.summary
    up = f"{told.uplink_bytes / 1e3:.0f} kB up"
    print(f"{name + ':':<24} {told.metrics['rmse']:.3f} kW, {up}")

# %% [markdown]
# ## Three days of a stranger
#
# `predict` takes windows as they were measured, and gives kW.

# %%
seen, truth = strangers[0]
hours = np.arange(72)
figure, axes = plt.subplots(figsize=(9, 4.2))
axes.plot(hours, truth[:72], color="#5b6770", linewidth=2, label="measured")
made = rotated.predict(seen[:72]).reshape(-1)
axes.plot(hours, made, color="#0072b2", label="verified rotation, an hour ahead")
axes.plot(hours, seen[:72, 0], ":", color="#d55e00", label="the same hour yesterday")
axes.set(xlabel="hour", ylabel="load, kW", xticks=range(0, 73, 12))
axes.set_title("The load of a house that no worker has seen")
axes.legend(loc="upper right", ncols=3)

# %% [markdown]
# Verified rotation sends a thirteenth of FedAvg's bytes, and here FedAvg is still the
# more accurate of the two: its houses are alike enough to be averaged.
#
# Add the weather or the day of the week as further numbers of a window. Your series can
# also be [a table](../tasks.md#tables-and-devices) whose columns are the readings of a
# window and the target; a device then joins with a `.csv` of its own. Other losses and
# metrics are in [tasks](../tasks.md).
