"""Lines of a workload file: a deep net whose bytes can be counted by hand, to be changed by further lines."""

WIDTH, DEPTH = 256, 6
WEIGHT = 4 * WIDTH * WIDTH
ENDS = 4 * (8 * WIDTH + WIDTH + 4 * WIDTH + 4)
PARAMETERS = DEPTH * WEIGHT + ENDS
NET = f"""
class Block(nn.Sequential):
    pass
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, {WIDTH}), nn.Linear({WIDTH}, 4)
        self.deep = nn.Sequential(*(self.block() for _ in range({DEPTH})))
    def block(self):
        return Block(nn.Linear({WIDTH}, {WIDTH}, bias=False), nn.Tanh())
    def forward(self, x):
        return self.last(self.run(self.first(x)))
    def run(self, x):
        return self.deep(x)
def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
model = Net
"""
