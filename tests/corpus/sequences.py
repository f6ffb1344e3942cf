"""Sequences: recurrent networks, transformers, causal convolutions, embeddings."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from corpus.case import Small, case

VOCAB = 23


def labelled(g: Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(1, VOCAB, (4, 7), generator=g), torch.randint(0, 4, (4,), generator=g)


def ragged(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.randint(3, 8, (4,), generator=g)
    lengths[0] = 7
    tokens = torch.randint(1, VOCAB, (4, 7), generator=g)
    tokens[torch.arange(7) >= lengths[:, None]] = 0
    return tokens, lengths, torch.randint(0, 4, (4,), generator=g)


@case("lstm", labelled)
class LstmClassifier(Small):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 9)
        self.lstm = nn.LSTM(9, 11, num_layers=2, batch_first=True)
        self.head = nn.Linear(11, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embed(tokens))
        return self.head(hidden[-1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, y = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits, y)
        self.log_dict({"loss": loss, "acc": (logits.argmax(-1) == y).float().mean()})
        return loss


@case("gru, packed", ragged)
class PackedGru(Small):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 9, padding_idx=0)
        self.gru = nn.GRU(9, 10, batch_first=True)
        self.head = nn.Linear(10, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, lengths, y = batch
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, hidden = self.gru(packed)
        output, _ = pad_packed_sequence(output, batch_first=True)
        return F.cross_entropy(self.head(hidden[0] + output.sum(1) / lengths[:, None]), y)


def speech(g: Generator) -> tuple[Tensor, ...]:
    lengths, targets = torch.randint(9, 13, (3,), generator=g), torch.randint(1, 6, (3, 4), generator=g)
    lengths[0] = 12
    return torch.randn(3, 12, 5, generator=g), targets, lengths, torch.randint(2, 5, (3,), generator=g)


@case("bilstm, ctc", speech)
class Ctc(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 6)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, targets, lengths, target_lengths = batch
        log_probs = self.head(self.lstm(x)[0]).log_softmax(-1).transpose(0, 1)
        return self.loss(log_probs, targets, lengths, target_lengths)


@case("encoder, padding and checkpoints", ragged)
class PaddedEncoder(Small):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12, padding_idx=0)
        self.register_buffer("position", torch.randn(1, 7, 12) * 0.1, persistent=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(12, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, lengths, y = batch
        padding = tokens == 0
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = checkpoint(layer, x, src_key_padding_mask=padding, use_reentrant=False)
        x = x.masked_fill(padding[..., None], 0.0).sum(1) / lengths[:, None]
        return F.cross_entropy(self.head(x), y, label_smoothing=0.1)


@case("padded tokens, ignored", ragged, reference="ddp")
class Ignored(Small):
    """A mean over as many tokens as each rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.decoder = nn.TransformerDecoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _, _ = batch
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        x = self.embed(tokens)
        x = self.decoder(x[:, :-1], x.flip(1), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).transpose(1, 2), tokens[:, 1:], ignore_index=0)


class CausalConv(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = parametrizations.weight_norm(nn.Conv1d(6, 12, 2, dilation=dilation))
        self.out = parametrizations.weight_norm(nn.Conv1d(6, 6, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        filters, gate = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, dim=1)
        y = self.out(filters.tanh() * gate.sigmoid())
        return x + y, y


def waves(g: Generator) -> Tensor:
    return torch.randn(3, 1, 14, generator=g).cumsum(-1) * 0.3


@case("wavenet, weight norm", waves)
class WaveNet(Small):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 6, 1)
        self.layers = nn.ModuleList(CausalConv(2**i) for i in range(3))
        self.last = nn.Conv1d(6, 1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, skip = self.first(batch[..., :-1]), 0
        for layer in self.layers:
            x, y = layer(x)
            skip = skip + y
        return F.mse_loss(self.last(F.relu(skip)), batch[..., 1:])


def translations(g: Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(1, VOCAB, (4, 5), generator=g), torch.randint(1, VOCAB, (4, 5), generator=g)


@case("scheduled sampling", translations, epochs=2, steps=2)
class Scheduled(Small):
    """The decoder reads its own words with a probability that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.encoder, self.cell = nn.GRU(8, 10, batch_first=True), nn.GRUCell(8, 10)
        self.query, self.head = nn.Linear(10, 10, bias=False), nn.Linear(20, VOCAB)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target = batch
        probability = min(0.8, 0.25 * (self.global_step + 1))
        keys, hidden = self.encoder(self.embed(source))
        hidden, word, loss = hidden[0], torch.zeros_like(target[:, 0]), 0.0
        for position in range(target.shape[1]):
            hidden = self.cell(self.embed(word), hidden)
            weights = torch.einsum("bd,btd->bt", self.query(hidden), keys).softmax(-1)
            logits = self.head(torch.cat([hidden, torch.bmm(weights[:, None], keys)[:, 0]], -1))
            loss = loss + F.cross_entropy(logits, target[:, position])
            word = logits.argmax(-1) if random.random() < probability else target[:, position]
        return loss / target.shape[1]


def interactions(g: Generator) -> tuple[Tensor, ...]:
    users, items = torch.randint(0, 17, (6,), generator=g), torch.randint(0, 13, (6,), generator=g)
    return users, items, torch.randint(0, 13, (6, 4), generator=g), torch.rand(6, generator=g)


@case("recommender", interactions)
class Recommender(Small):
    """Tables, a bag of words, and a pretrained table that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(17, 6), nn.Embedding(13, 6)
        self.user_bias, self.item_bias = nn.Embedding(17, 1), nn.Embedding(13, 1)
        self.history = nn.EmbeddingBag(13, 6, mode="mean")
        self.pretrained = nn.Embedding.from_pretrained(torch.randn(13, 5), freeze=True)
        self.project = nn.Linear(5, 6)
        self.mu = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        users, items, history, rating = batch
        user = self.users(users) + self.history(history)
        item = self.items(items) + self.project(self.pretrained(items))
        score = (user * item).sum(-1) + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0] + self.mu
        return F.mse_loss(score, rating) + 1e-2 * (user.square().mean() + item.square().mean())


def bags(g: Generator) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(0, 13, (12,), generator=g), torch.tensor([0, 3, 5, 9]), torch.randint(0, 4, (4,), generator=g)


@case("bags with offsets", bags, reference="ddp")
class Bags(Small):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(13, 6, mode="sum")
        self.most = nn.EmbeddingBag(13, 6, mode="max")
        self.head = nn.Linear(6, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, offsets, y = batch
        return F.cross_entropy(self.head(self.bag(words, offsets) + self.most(words, offsets)), y)
