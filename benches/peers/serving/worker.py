"""Answers conversations with transformers' `generate` for `serve.py`, as jobs of `peer.py`."""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import peer

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
# The model and tokenizer of the last job, and its tokens with their keys and values.
loaded, served = {}, {}


def load(job):
    import transformers

    if not loaded:
        transformers.logging.set_verbosity_error()
        setting = job["setting"]
        loaded["model"] = peer.load(job, setting, DTYPES[setting["dtype"]]).eval()
        loaded["tokenizer"] = transformers.AutoTokenizer.from_pretrained(job["model"], padding_side="left")
        loaded["tokenizer"].pad_token = loaded["tokenizer"].pad_token or loaded["tokenizer"].eos_token
    return loaded["model"], loaded["tokenizer"]


def shared_length(left, right):
    """Number of tokens that two prompts begin with, less than all of `right`."""
    same = 0
    while same < min(len(left), len(right) - 1) and left[same] == right[same]:
        same += 1
    return same


def cache_of(ids):
    """The kept keys and values of the prefix that `ids` share with the last single prompt."""
    if "cache" in served:
        same = shared_length(served["ids"], ids)
        if same:
            cache = served.pop("cache")
            unshared = cache.get_seq_length() - same
            if unshared:
                cache.crop(-unshared)
            return cache
    return None


def answer(job):
    """One batch. All its answers have their tokens at the same times: when the logits were there."""
    import torch
    import transformers

    model, tokenizer = load(job)
    times = []

    class Clock(transformers.LogitsProcessor):
        def __call__(self, _ids, scores):
            times.append(time.perf_counter())
            return scores

    sent = time.perf_counter()
    texts = [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
             for messages in job["conversations"]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    single = len(texts) == 1 and job["setting"]["cache"] == "dynamic"
    options = {"cache_implementation": job["setting"]["cache"]}
    if single:
        ids = inputs["input_ids"][0].tolist()
        cache = cache_of(ids)
        options = {"past_key_values": cache if cache is not None else transformers.DynamicCache(config=model.config)}
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    sampled = {"do_sample": True, "temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        out = model.generate(
            **inputs, min_new_tokens=job["tokens"], max_new_tokens=job["tokens"], return_dict_in_generate=True,
            logits_processor=transformers.LogitsProcessorList([Clock()]), pad_token_id=tokenizer.eos_token_id,
            **(sampled if job["temperature"] else greedy), **options)
    if single:
        served.update(ids=ids, cache=out.past_key_values)
    length = inputs["input_ids"].shape[1]
    new = out.sequences[:, length:]
    assert new.shape[1] == job["tokens"] == len(times), f"{new.shape[1]} tokens in {len(times)} steps"
    prompt_tokens = inputs["attention_mask"].sum(1).tolist()
    return {"answers": [{"sent": sent, "times": times, "prompt_tokens": prompt, "tokens": new.shape[1], "text": text}
                        for prompt, text in zip(prompt_tokens, tokenizer.batch_decode(new, skip_special_tokens=True))]}


if __name__ == "__main__":
    peer.KINDS = {"answer": answer}
    peer.main()
