"""A network over one graph: every step is of the whole graph, and classes of some nodes are trained on."""

import torch
from torch import nn, optim
from torch.nn import functional

import headrace as hr  # headrace


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, x @ self.kernel)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(6, 8), GraphConv(8, 3)

    def forward(self, x, adjacency):
        return functional.log_softmax(self.gc2(functional.relu(self.gc1(x, adjacency)), adjacency), dim=1)


torch.manual_seed(42)
nodes = 40
edges = torch.rand(nodes, nodes) < 0.1
adjacency = (edges | edges.t() | torch.eye(nodes, dtype=torch.bool)).double()
degrees = adjacency.sum(1).rsqrt()
adjacency = (degrees[:, None] * adjacency * degrees).to_sparse()
labels = torch.randint(3, (nodes,))
features = torch.randn(nodes, 6) + 2 * functional.one_hot(labels, 6)
order = torch.randperm(nodes)
idx_train, idx_test = order[:21], order[21:]
gcn = GCN()
optimizer = optim.Adam(gcn.parameters(), lr=0.01, weight_decay=5e-4)
gcn, optimizer, _ = hr.setup(gcn, optimizer, None)  # headrace
idx_train = hr.processes().share(idx_train)  # headrace
history = []
for epoch in range(8):
    optimizer.zero_grad()
    output = gcn(features, adjacency)
    loss = functional.nll_loss(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        output = gcn(features, adjacency)
        history.append(functional.nll_loss(output[idx_test], labels[idx_test]).item())
