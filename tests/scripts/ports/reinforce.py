"""Policy gradients on a small walk: an episode after another, discounted returns, one update an episode."""

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional

import headrace as hr  # headrace


class Walk:
    """A walk on a line; it ends at +-4, and +4 is worth something."""

    def __init__(self):
        self.random = torch.Generator()

    def reset(self, seed):
        self.random.manual_seed(seed)
        self.place, self.steps = 0.0, 0
        return self._state()

    def _state(self):
        return torch.tensor([self.place / 4, self.steps / 20, 1.0])

    def step(self, action):
        slip = torch.rand((), generator=self.random).item() < 0.1
        self.place += 1.0 if (action == 1) != slip else -1.0
        self.steps += 1
        done = abs(self.place) >= 4 or self.steps >= 20
        return self._state(), float(self.place >= 4) - 0.02, done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return functional.softmax(self.affine2(functional.relu(self.affine1(x))), dim=-1)


torch.manual_seed(543)
here = hr.processes()  # headrace
policy, env = Policy(), Walk()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
policy, optimizer, _ = hr.setup(policy, optimizer, None)  # headrace
history, running_reward = [], 0.0
for i_episode in range(5):
    seed, ep_reward, saved, rewards = i_episode, 0.0, [], []
    seed = seed * here.world + here.rank  # headrace
    state = env.reset(seed)
    for _ in range(100):
        distribution = Categorical(policy(state))
        action = distribution.sample()
        saved.append(distribution.log_prob(action))
        state, reward, done = env.step(action.item())
        rewards.append(reward)
        ep_reward += reward
        if done:
            break
    running_reward = 0.05 * ep_reward + 0.95 * running_reward
    R, returns = 0, []
    for r in rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    optimizer.zero_grad()
    policy_loss = torch.stack([-log_prob * R for log_prob, R in zip(saved, returns, strict=True)]).sum()
    policy_loss.backward()
    optimizer.step()
    history.append(len(rewards))
