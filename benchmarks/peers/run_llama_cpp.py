"""The worker of `llama-cpp-python`, on the same float32 weights in a GGUF file."""

from __future__ import annotations

from itertools import islice
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from .protocol import Method, Run, arguments, serve


def methods(file: str, threads: int) -> dict[str, Method]:
    def decoding(draft: Any) -> Run:
        model = Llama(
            model_path=file,
            n_ctx=2048,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=draft is not None,  # which drafting asks for
            draft_model=draft,
            verbose=False,
        )
        passes = 0
        evaluate = model.eval

        def counted(tokens: Any) -> None:
            nonlocal passes
            passes += 1
            evaluate(tokens)

        model.eval = counted  # type: ignore[method-assign]
        end = model.token_eos()

        def run(prompt: list[int], count: int) -> tuple[list[int], int, int]:
            nonlocal passes
            model.reset()  # else it would reuse what it knows of the prompt
            passes, tokens = 0, []
            for token in islice(model.generate(prompt, temp=0.0, repeat_penalty=1.0), count):
                tokens.append(token)
                if token == end:
                    break
            return tokens, passes - 1, len(tokens) - 1

        return run

    def prompt_lookup(options: dict[str, Any]) -> Run:
        return decoding(LlamaPromptLookupDecoding(options["max_ngram"], options["gamma"]))

    return {"none": lambda _: decoding(None), "prompt-lookup": prompt_lookup}


def main() -> None:
    given = arguments()
    serve(methods(given.model, given.threads))


if __name__ == "__main__":
    main()
