"""An ONNX file, optimized; the result is written where `--output` says."""

from __future__ import annotations

import sys

from common import optimized, options

import taso


def build(path: str) -> taso.Graph:
    return taso.load(path)


def main() -> None:
    parser = options("Optimizes an ONNX file.")
    parser.add_argument("model", help="the ONNX file")
    parser.add_argument("-o", "--output", help="where to write the optimized model")
    settings = parser.parse_args()
    try:
        best = optimized(build(settings.model), settings)
        if settings.output:
            taso.save(best, settings.output)
    except taso.TasoError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
