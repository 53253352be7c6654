"""Fourier transforms, sharded over the dims that are not transformed."""

import pytest
import torch

from .operator_checks import S0, S1, P, R, check

FUNCTIONS = {
    "fft": torch.fft.fft,
    "ifft of the first": lambda x: torch.fft.ifft(x, dim=0),
    "rfft": torch.fft.rfft,
    "hfft": torch.fft.hfft,
    "irfft": lambda x: torch.fft.irfft(x, n=7),
    "fft2": torch.fft.fft2,
    "rfftn": torch.fft.rfftn,
    "norm": lambda x: torch.fft.fft(x, norm="ortho"),
}


@pytest.mark.parametrize("placed", [S0, S1, P, (S0, S1), (S1, P), (R, S0)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms(name, placed):
    check(FUNCTIONS[name], [torch.randn(8, 4, 6)], [placed])


def test_what_is_not_transformed_stays():
    for placed in (S0, S1, P, (S0, S1)):
        check(torch.fft.fft, [torch.randn(8, 4, 6).to(torch.complex64)], [placed], placed, most=0)
    check(torch.fft.fft, [torch.randn(7, 4, 6).to(torch.complex64)], [S0], S0, most=0)
