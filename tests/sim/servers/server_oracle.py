"""What one process would compute: numbers that depend on everything before them."""


def mix(*words):
    """Return a number that every word and their order change."""
    return hash(words)


def initial(piece):
    return mix(len(piece.table), piece.index)


def gradients(rank, clock, values):
    """Return the gradient of each slice, which depends on all rows that were seen."""
    seen = mix(*[values[piece] for piece in sorted(values)])
    return {piece: mix(rank, clock, piece.index, seen) for piece in values}


def total(parts):
    """Return the norm of the sum of gradients: worker -> its gradients."""
    pieces = sorted({piece for part in parts.values() for piece in part})
    return {
        piece: mix(*[(rank, part[piece]) for rank, part in sorted(parts.items())])
        for piece in pieces
    }


def factor_of(norms):
    return mix(*[norms[piece] for piece in sorted(norms)])


def scaled(part, factor):
    return {piece: mix(each, factor) for piece, each in part.items()}


def stepped(value, version, terms):
    return mix(value, version, tuple(terms))


class Oracle:
    """The same training in one process: the rows at each version.

    Each step measures its gradients `rounds` times, and scales them by what comes of it.
    """

    def __init__(self, pieces, lengths, rounds):
        self.lengths, self.rounds = lengths, rounds
        self.states = [{piece: initial(piece) for piece in pieces}]
        self.since = [(0, ())]

    def decide(self, version, workers):
        """From `version` on, these workers add their gradients."""
        self.since = [entry for entry in self.since if entry[0] < version] + [(version, workers)]
        del self.states[version + 1 :]

    def at(self, version):
        while len(self.states) <= version:
            now = len(self.states) - 1
            values = self.states[-1]
            workers = [entry for entry in self.since if entry[0] <= now][-1][1]
            parts = {
                rank: gradients(rank, now, values) for rank in workers if self.lengths[rank] > now
            }
            for _ in range(self.rounds if parts else 0):
                factor = factor_of(total(parts))
                parts = {rank: scaled(part, factor) for rank, part in parts.items()}
            self.states.append(
                {
                    piece: stepped(
                        value, now, [(rank, part[piece]) for rank, part in parts.items()]
                    )
                    for piece, value in values.items()
                }
            )
        return self.states[version]
