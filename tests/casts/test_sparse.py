"""Products with a sparse tensor at O1 and O4: FP32, rounded to the level's type, for every layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from torch import Tensor, nn
from training import iterate

from amp_patch import amp
from amp_patch.casts import install, regions
from amp_patch.policy import Policy

LOW = [torch.float16, torch.bfloat16]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "spmm": lambda a, x: torch.spmm(a, x),
    "dsmm": lambda a, x: torch.dsmm(a, x),
    "sparse.mm": lambda a, x: torch.sparse.mm(a, x),
    "sparse.addmm": lambda a, x: torch.sparse.addmm(torch.zeros_like(x), a, x),
    "@": lambda a, x: a @ x,
    "mm": lambda a, x: torch.mm(a, x),
    "mm by name": lambda a, x: torch.mm(input=a, mat2=x),
    "Tensor.mm": lambda a, x: a.mm(x),
    "matmul": lambda a, x: torch.matmul(a, x),
    "addmm": lambda a, x: torch.addmm(torch.zeros_like(x), a, x),
    "mv": lambda a, x: torch.stack([torch.mv(a, column) for column in x.unbind(1)], 1),
    "bmm": lambda a, x: torch.bmm(a.to_dense()[None].to_sparse(), x[None])[0],
    "dense first": lambda a, x: (x.T @ a.to_dense().T.to_sparse()).T,
}


@pytest.fixture(autouse=True)
def installed(wrappers: str) -> None:
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    install.install()


def adjacency(layout: str, device: str) -> Tensor:
    values = torch.rand(5, 5, generator=torch.Generator().manual_seed(0))
    return LAYOUTS[layout](torch.where(values < 0.5, torch.zeros(()), values).to(device))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("device", DEVICES)
@crossed({"product": list(PRODUCTS), "layout": list(LAYOUTS), "dtype": LOW})
def test_products_are_fp32s_rounded_once(product: str, layout: str, dtype: torch.dtype, device: str) -> None:
    a = adjacency(layout, device)
    for given in (torch.float32, dtype):
        x = torch.rand(5, 3, generator=torch.Generator().manual_seed(1)).to(device, given).requires_grad_()
        expected = PRODUCTS[product](a, x.float())
        with regions.region(Policy("O1", dtype=dtype, patch_torch_functions=True)):
            found = PRODUCTS[product](a, x)
        assert found.dtype is dtype and torch.equal(found, expected.to(dtype))
        grads = [torch.autograd.grad(each.float().square().sum(), x)[0] for each in (found, expected.to(dtype))]
        assert grads[0].dtype is given and torch.equal(*grads)


@pytest.mark.parametrize("dtype", LOW)
def test_the_product_of_two_sparse_tensors_stays_sparse_and_fp32(dtype: torch.dtype) -> None:
    a = adjacency("coo", "cpu")
    with regions.region(Policy("O1", dtype=dtype, patch_torch_functions=True)):
        assert torch.sparse.mm(a, a.to(dtype)).dtype is (a @ a).dtype is torch.float32


class GCN(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product, self.first, self.second = product, nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return self.product(a, self.second(self.product(a, self.first(x)).relu()))


@crossed({"level": ["O0", "O1", "O2", "O4", "O5"], "product": ["spmm", "sparse.mm", "@", "sparse.addmm"]}, meet=1)
def test_a_graph_network_trains_at_every_level_as_with_a_dense_adjacency(level: str, product: str) -> None:
    losses = []
    for a in (adjacency("coo", "cpu"), adjacency("coo", "cpu").to_dense()):
        torch.manual_seed(0)
        net = GCN(PRODUCTS[product] if a.is_sparse else torch.matmul)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
        targets = torch.tensor([0, 1, 2, 0, 1])

        def loss_of(_: int, net: nn.Module = net, a: Tensor = a, targets: Tensor = targets) -> Tensor:
            return nn.functional.cross_entropy(net(torch.rand(5, 4), a).float(), targets)

        losses += iterate(optimizer, loss_of, range(4))
    assert losses[:4] == pytest.approx(losses[4:], rel=2e-2), "BF16 has 8 bits; the two are rounded at other places"
