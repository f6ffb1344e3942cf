"""Images: convolutions, pooling, norms, patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from corpus.case import Small, case


def images(size: int = 16, channels: int = 3, rows: int = 4, classes: int = 5) -> Callable[[Generator], Any]:
    def batch(g: Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, channels, size, size, generator=g), torch.randint(0, classes, (rows,), generator=g)

    return batch


class Classifier(Small):
    """Subclasses have a `forward`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += identity
        return F.relu(out)


@case("resnet", images(), reference="ddp")
class ResNet(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5, 1, 2, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = BasicBlock(6, 6)
        self.layer2 = BasicBlock(6, 10, 2)
        self.fc = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.relu(self.down(x.mean((2, 3), keepdim=True)))
        return x * F.hardsigmoid(self.up(scale))


class InvertedResidual(nn.Sequential):
    def __init__(self, channels: int, expand: int) -> None:
        super().__init__(
            nn.Conv2d(channels, expand, 1, bias=False),
            nn.BatchNorm2d(expand),
            nn.Hardswish(),
            nn.Conv2d(expand, expand, 3, padding=1, groups=expand, bias=False),
            nn.BatchNorm2d(expand),
            SqueezeExcite(expand),
            nn.Hardswish(),
            nn.Conv2d(expand, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@case("mobilenet", images(12), reference="ddp")
class MobileNet(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, 2, 1)
        self.blocks = nn.Sequential(InvertedResidual(5, 10), InvertedResidual(5, 11))
        self.head = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((-2, -1)))


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(2, outputs),
        nn.SiLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(2, outputs),
        nn.SiLU(inplace=True),
    )


def masks(g: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 1, 16, 16, generator=g)
    return x, (x.roll(1, -1) > 0.3).float()


@case("unet", masks)
class UNet(Small):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = double_conv(1, 4), double_conv(4, 6), double_conv(6, 8)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 4, 2, 2)
        self.dec2, self.dec1 = double_conv(12, 6), double_conv(8, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in (self.down1, self.down2):
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up, decode in ((self.up2, self.dec2), (self.up1, self.dec1)):
            x = decode(torch.cat([skips.pop(), up(x)], dim=1))
        return self.out(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        logits = self(x)
        p = logits.sigmoid()
        dice = 1 - (2 * (p * target).sum((1, 2, 3)) / (p + target).sum((1, 2, 3))).mean()
        return F.binary_cross_entropy_with_logits(logits, target) + dice


@case("pooling and dropout", images(), reference="ddp")
class Pooled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.LeakyReLU(), nn.AvgPool2d(2), nn.Dropout2d(0.2),
            nn.Conv2d(6, 9, 3), nn.ELU(), nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), nn.Dropout(0.4),
        )  # fmt: skip
        self.head = nn.LazyLinear(5)
        self.head(torch.empty(1, 54))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@case("interpolation", images(9))
class Interpolated(Classifier):
    """A spatial transformer and a pyramid: sampling grids, resizing, padding, pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.localise = nn.Linear(3 * 81, 6)
        nn.init.zeros_(self.localise.weight)
        self.localise.bias.data.copy_(torch.tensor([0.9, 0.05, 0.0, 0.05, 0.9, 0.0]))
        self.conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.lateral = nn.ModuleList(nn.Conv2d(2, 4, 1) for _ in range(2))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.localise(x.flatten(1)).view(-1, 2, 3)
        x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        x = F.pixel_shuffle(self.conv(F.pad(x, (1, 0, 0, 1))), 2)
        small = self.lateral[0](F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False))
        x = self.lateral[1](x) + F.interpolate(small, size=x.shape[-2:], mode="nearest")
        return self.head(x.amax((2, 3)))


@case("vit", images(12, 3))
class ViT(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 10, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.encoder(x)[:, 0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@case("mlp mixer and attention", images(8))
class Mixed(Classifier):
    """Attention written by hand, layer scale, and a mixer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Unfold(4, stride=4)
        self.project = nn.Linear(48, 12)
        self.attention = Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(3))
        self.gamma = nn.ParameterList(nn.Parameter(torch.full((12,), 0.1)) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(4, 7), nn.GELU(approximate="tanh"), nn.Linear(7, 4))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(self.embed(x).transpose(1, 2))
        x = x + self.gamma[0] * self.attention(self.norms[0](x))
        x = x + self.gamma[1] * self.tokens(self.norms[1](x).mT).mT
        return self.head(self.norms[2](x).mean(1))
