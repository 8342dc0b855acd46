"""Libraries of which one small training shows that numbers stay."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.libraries.ways import Way


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=draw)
    return x, x.sum(-1, keepdim=True).sin()


def keras(way: Way) -> None:
    """A Keras model of layers, and a module of PyTorch among them."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.set_random_seed(0)
    x, y = _data()
    inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    layer = keras.layers.TorchModuleWrapper(way.module(inner))
    model = keras.Sequential([keras.layers.Dense(16, "tanh"), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for _ in range(way.steps):
        way.losses.append(float(model.train_on_batch(x.numpy(), y.numpy())))


def skorch(way: Way) -> None:
    """A regressor as scikit-learn has it."""
    from skorch import NeuralNetRegressor

    torch.manual_seed(0)
    x, y = _data()
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    net = NeuralNetRegressor(
        way.module(inner), max_epochs=way.steps, batch_size=-1, train_split=None, verbose=0, lr=0.1
    )
    net.fit(x.numpy(), y.numpy())
    way.losses += [float(each) for each in net.history[:, "train_loss"]]


def stable_baselines3(way: Way) -> None:
    """Proximal policy optimisation, with its features' network through a graph."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Features(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, 16)
            self.net = way.module(nn.Sequential(nn.Linear(4, 16), nn.Tanh()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    env = gymnasium.make("CartPole-v1")
    policy = {"features_extractor_class": Features}
    model = PPO(
        "MlpPolicy", env, n_steps=64, n_epochs=2, seed=0, device="cpu", policy_kwargs=policy
    )
    for _ in range(max(1, way.steps // 10)):
        model.learn(64, reset_num_timesteps=False)
        way.losses.append(
            float(sum(p.detach().double().abs().sum() for p in model.policy.parameters()))
        )


def gpytorch(way: Way) -> None:
    """A Gaussian process over the features of a network."""
    import gpytorch

    torch.manual_seed(0)
    x, y = _data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y[:, 0], likelihood)
            self.features = way.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            z = self.features(x)
            return gpytorch.distributions.MultivariateNormal(self.mean(z), self.kernel(z))

    model = Process()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(way.steps):
        loss = -objective(model(x), y[:, 0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.losses.append(float(loss.detach()))


def pyro(way: Way) -> None:
    """A variational autoencoder."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO

    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    x, _ = _data()
    encoder = way.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    decoder = way.module(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 8)))

    def model(x: torch.Tensor) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 0.5).to_event(1), obs=x)

    def guide(x: torch.Tensor) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("data", len(x)):
            mean, spread = encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(mean, spread.exp()).to_event(1))

    steps = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    way.losses += [float(steps.step(x)) for _ in range(way.steps)]


def e3nn(way: Way) -> None:
    """An equivariant network over points."""
    from e3nn import o3

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.harmonics = o3.SphericalHarmonics("0e + 1o", normalize=True)
            self.product = o3.FullyConnectedTensorProduct("1x0e + 1x1o", "4x0e", "8x0e + 4x1o")
            self.last = o3.Linear("8x0e + 4x1o", "1x0e")

        def forward(self, points: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            return self.last(self.product(self.harmonics(points), features)).mean(0)  # type: ignore[no-any-return]

    inner = Net()
    model = way.module(inner)
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(0)
    points, features = torch.randn(32, 3, generator=draw), torch.randn(32, 4, generator=draw)
    for _ in range(way.steps):
        loss = (model(points, features) - 1).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        way.losses.append(float(np.float64(loss.detach())))
