# %% [markdown]
# # Your own sensor data, by subject
#
# Ten people wear a sensor. Their samples stay where they are; the model should work for
# people it has never met. This page takes arrays from *your data* to *a trained model*,
# with made data in place of yours, so that it runs everywhere; at its end the same is
# done with recordings of real people, if you have fetched them.
#
# Download this page as a notebook: <a href="sensors.ipynb">sensors.ipynb</a>.
#
# ## Made data that is difficult in the right way
#
# A window is 3 channels of 64 readings. Four activities differ in rhythm and strength;
# people differ in pace, in how they wear the sensor (a rotation), and in noise. And
# everybody does some activities more than others.

# %%
import matplotlib.pyplot as plt
import numpy as np
from torch import nn

import cbdsl

rng = np.random.default_rng(4)
ACTIVITIES = ["sit", "walk", "climb", "run"]
RHYTHM, STRENGTH = np.array([0.3, 1.6, 1.3, 2.8]), np.array([0.1, 0.8, 1.2, 1.5])


def person():
    """What makes a person: pace, a rotation of the sensor, noise, and habits."""
    rotation, _ = np.linalg.qr(np.eye(3) + 0.35 * rng.normal(size=(3, 3)))
    return (
        rng.normal(1, 0.12),
        rotation,
        rng.uniform(0.3, 0.8),
        rng.dirichlet(np.full(4, 0.8)),
    )


def windows(who, count, habits=None):
    """Labelled windows of one person, (count, 3, 64)."""
    pace, rotation, noise, own_habits = who
    labels = rng.choice(4, count, p=own_habits if habits is None else habits)
    time = np.linspace(0, 4, 64)
    phase = rng.uniform(0, 2 * np.pi, (count, 1))
    swing = STRENGTH[labels][:, None] * np.sin(
        2 * np.pi * pace * RHYTHM[labels][:, None] * time + phase
    )
    bounce = (
        0.6
        * STRENGTH[labels][:, None]
        * np.sin(4 * np.pi * pace * RHYTHM[labels][:, None] * time + phase)
    )
    signal = np.stack([swing, bounce, 0.5 * swing - bounce], 1)
    return np.einsum("ij,njt->nit", rotation, signal) + noise * rng.normal(
        size=(count, 3, 64)
    ), labels


wearers = [person() for _ in range(10)]
strangers = [person() for _ in range(8)]
clients = [windows(who, rng.integers(60, 160)) for who in wearers]
print("samples by person:", [len(labels) for _, labels in clients])

# %% [markdown]
# ## The shared set, and the test
#
# Somebody has to provide D_G: labelled windows that may be shown to everybody. Here two
# volunteers recorded them. The test set is of the eight strangers, and nobody trains on
# them.
#
# `Dataset.from_arrays` takes training and test arrays. With `clients` given, its
# training part is used for D_G and the server's hold-out alone.

# %%
volunteers = [windows(person(), 400, np.full(4, 0.25)) for _ in range(2)]
tests = [windows(who, 150, np.full(4, 0.25)) for who in strangers]
data = cbdsl.Dataset.from_arrays(
    *(np.concatenate(part) for part in zip(*volunteers)),
    *(np.concatenate(part) for part in zip(*tests)),
    name="made sensors",
)


class Net(nn.Module):
    """Two convolutions over time, and a mean: works for windows of any length."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(3, 12, 7, padding=3),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(12, 16, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        return self.layers(x)


# %% [markdown]
# ## Alone, averaged, in rotation
#
# First everybody alone: a run with one worker is plain SGD. Then together, two ways:
# FedAvg, and [verified rotation](../idea.md#beyond-one-winner-verified-rotation) with
# 4-bit uploads. All three train on their own samples and on D_tr.

# %%
settings = {
    "rounds": 15,
    "data.shared_training": 60,
    "data.shared_scoring": 300,
    "data.holdout": 200,
    "local.learning_rate": 0.02,
    "local.momentum": 0.9,
}
average = settings | {"method": "fedavg", "shared": "train"}
rotation = settings | {
    "method": "restart",
    "selection.name": "rotation",
    "selection.k": 4,
    "codec.up": "q4",
    "codec.down": "q4",
    "defence.guard": True,
    "defence.commitment": True,
}


def learn(settings, clients):
    return cbdsl.run(
        cbdsl.Spec(workers=len(clients)).with_settings(settings),
        model=Net,
        clients=clients,
        data=data,
    )


alone = [learn(average, [client]) for client in clients]
averaged = learn(average, clients)
rotated = learn(rotation, clients)
each = [one.summary.final_accuracy for one in alone]
print(f"alone:    {np.mean(each):.1%} of the strangers' windows, on the mean")
for name, result in {"averaged": averaged, "rotation": rotated}.items():
    said = result.summary
    print(f"{name}: {said.final_accuracy:.1%}, {said.uplink_bytes / 1e3:.0f} kB up")

# %% [markdown]
# ## Person by person
#
# A mean hides people. Here is what each model is worth to each of the eight strangers.


# %%
def on_strangers(result):
    return [
        100 * np.mean(result.predict(features) == labels) for features, labels in tests
    ]


order = np.argsort(on_strangers(rotated))
places = np.arange(len(strangers))
figure, axes = plt.subplots(figsize=(9, 4.6))
for number, one in enumerate(alone):
    label = "one of the ten people, alone" if number == 0 else None
    heights = np.take(on_strangers(one), order)
    axes.plot(
        places, heights, "o", color="#5b6770", alpha=0.55, markersize=5, label=label
    )
axes.plot(
    places,
    np.take(on_strangers(averaged), order),
    "s",
    color="#d55e00",
    markersize=9,
    label="FedAvg + D_tr",
)
axes.plot(
    places,
    np.take(on_strangers(rotated), order),
    "D",
    color="#0072b2",
    markersize=9,
    label="verified rotation",
)
axes.set_xticks(
    places, [f"stranger {number + 1}" for number in order], rotation=30, ha="right"
)
axes.set(ylabel="accuracy on this person, %", ylim=(0, 105))
axes.grid(axis="x", visible=False)
axes.set_title("What ten people learnt together is worth to people they never met")
axes.legend(loc="lower right")

# %% [markdown]
# ## With recordings of real people
#
# `hapt` is a data set of 30 people with a phone at the waist; 21 of them are workers
# and nine are the test. It is fetched once, by a command; where it is not here, the
# error says which.

# %%
try:
    real = cbdsl.run(cbdsl.preset("hapt").with_settings({"rounds": 5}))
    said = real.summary
    print(f"hapt, 5 rounds: {said.final_accuracy:.1%} of the windows of nine strangers")
except cbdsl.UserError as error:
    print(error)

# %% [markdown]
# Five rounds are a taste; [on the field's data](../field.md) has thirty, three seeds,
# six methods, and attackers. Arrays of your own go into an `.npz` for the command line
# as well: [data](../data.md).
