"""`torch.compile(backend="taso")` gives what eager PyTorch gives, or is eager PyTorch with one warning."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import taso

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.slow

OPTIONS = {"backend": "reference", "budget": 3}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def compiled(function: Callable[..., object], **more: object) -> Callable[..., object]:
    # importing makes the name known where taso is not installed
    import taso.torch_backend  # noqa: F401  # registers

    return torch.compile(function, backend="taso", options={**OPTIONS, **more})


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if w.category is taso.FallbackWarning]


def close(a: object, b: object) -> bool:
    return torch.equal(a, b) if not a.is_floating_point() else float((a - b).abs().max() / b.abs().max()) <= 1e-5


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.linear = torch.nn.Linear(8, 4)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.convolution(x)))
        return self.linear(self.drop(x.mean((2, 3))))


def net() -> Net:
    model = Net().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
    return model


def test_a_module_gives_what_eager_gives_at_several_sizes_without_a_warning() -> None:
    model = net()
    run = compiled(model)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", taso.FallbackWarning)
        for count in (1, 3):
            x = torch.randn(count, 3, 8, 8)
            assert close(run(x), model(x))


def test_weights_are_constants_and_noticed_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[taso.Graph] = []
    from taso import api

    optimize = api.optimize
    monkeypatch.setattr(api, "optimize", lambda graph, **said: seen.append(graph) or optimize(graph, **said))
    model, x = net(), torch.randn(2, 3, 8, 8)
    run = compiled(model)
    with torch.no_grad():
        run(x)
        assert [len(g.inputs) for g in seen] == [1]
        model.linear.weight.mul_(-3)
        assert close(run(x), model(x))
        assert len(seen) == 2
        run(x)
        assert len(seen) == 2


def test_modules_that_are_built_alike_keep_their_own_weights() -> None:
    first, second = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval() for _ in range(2))
    runs, x = [compiled(first), compiled(second)], torch.randn(2, 4)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", taso.FallbackWarning)
        for _ in range(2):
            for run, model in zip(runs, (first, second), strict=True):
                assert close(run(x), model(x))


def test_gradients_are_left_to_pytorch() -> None:
    model, x = net(), torch.randn(2, 3, 8, 8)
    run = compiled(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(x).sum().backward()
        run(x)
    assert len(said(caught)) == 1 and "inference_mode" in said(caught)[0]
    assert model.linear.weight.grad is not None


def writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def draws(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def views(x: torch.Tensor) -> torch.Tensor:
    return x.t()


def lacks(x: torch.Tensor) -> torch.Tensor:
    return torch.special.bessel_j0(x) + 1


@pytest.mark.parametrize(
    "function, why",
    [(writes, "writes to its inputs"), (draws, "random numbers"), (views, "shares memory"), (lacks, "bessel")],
)
def test_what_cannot_be_converted_runs_eagerly_with_one_warning(
    function: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    run = compiled(function)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            x = torch.randn(3, 3)
            ours, theirs = x.clone(), x.clone()
            torch.manual_seed(1)
            found = run(ours)
            torch.manual_seed(1)
            expected = function(theirs)
            assert torch.equal(found, expected) and torch.equal(ours, theirs)
    assert len(said(caught)) == 1, said(caught)
    assert why in said(caught)[0]


def test_a_training_module_updates_its_buffers_as_eager_does() -> None:
    ours, theirs = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    x = torch.randn(8, 4)
    with torch.no_grad(), pytest.warns(taso.FallbackWarning):
        assert torch.equal(compiled(ours)(x), theirs(x))
    assert torch.equal(ours.running_mean, theirs.running_mean)


def test_several_outputs_nested_inputs_numbers_and_an_input_returned() -> None:
    def function(pair: tuple[torch.Tensor, torch.Tensor], n: int) -> dict[str, object]:
        a, b = pair
        return {"sum": a * n + b, "same": a, "n": n + 1, "whole": (b > 0).to(torch.int64)}

    a, b = torch.randn(4), torch.randn(4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", taso.FallbackWarning)
        found = compiled(function)((a, b), 3)
    assert found["same"] is a and found["n"] == 4
    assert close(found["sum"], a * 3 + b) and torch.equal(found["whole"], (b > 0).to(torch.int64))


def test_bfloat16_goes_through() -> None:
    x = torch.randn(4, 4).to(torch.bfloat16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", taso.FallbackWarning)
        found = compiled(lambda x: torch.relu(x) * 2)(x)
    assert torch.equal(found, torch.relu(x) * 2)


def test_results_that_differ_from_eager_ones_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from taso import api

    wrong = taso.new_graph()
    wrong.exp(input=wrong.new_input(dims=(3,)))
    monkeypatch.setattr(api, "load", lambda source: wrong)
    x = torch.randn(3)
    with torch.no_grad(), pytest.warns(taso.FallbackWarning, match="differ from the eager ones"):
        assert torch.equal(compiled(torch.sin)(x), torch.sin(x))


def test_an_unknown_option_is_told() -> None:
    with torch.no_grad(), pytest.warns(taso.FallbackWarning, match="bugdet"):
        compiled(torch.sin, bugdet=3)(torch.ones(2))


def test_taso_itself_does_not_import_torch_and_the_module_makes_the_name_known() -> None:
    root = Path(taso.__file__).parents[1]
    code = "import sys, taso; assert 'torch' not in sys.modules\nimport taso.torch_backend, torch\n"
    code += "assert 'taso' in torch._dynamo.list_backends()\n"
    code += "from torch._dynamo.backends.registry import lookup_backend\n"
    code += "assert lookup_backend('taso') is taso.torch_backend.taso_backend"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
