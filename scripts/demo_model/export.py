"""Export to a Hugging Face folder, and the measurements the model card is made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .network import Shape, StoryModel, greedy, sample
from .repeats import share_repeating
from .text import END_ID, END_OF_TEXT
from .training import PART_BYTES, Data, bits_per_byte, load_weights, split_parts
from .tuning import held_out_prompts

PROMPTS = (
    "Once upon a time",
    "There was once a little mouse who",
    "Long ago, in a kingdom by the sea, there lived a princess",
    '"Where are you going?" asked the fox.',
    "The old woman put on her red shawl and went out into the snow",
    "One morning a boy named Tom found a golden key",
    "Deep in the forest there stood a house with no door,",
    "The giant was very hungry",
    "When the moon rose, the toys began to talk.",
    "A poor fisherman had three sons, and the youngest",
)

# Messages follow one another as a story does: a reply goes on where the user's text stops, and a later
# message of the user starts a paragraph. System messages are left out: the model follows no instructions.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% set state = namespace(first=true) %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% elif message['role'] != 'system' %}"
    "{% if not state.first %}{{ '\\n\\n' }}{% endif %}{{ message['content'] | trim }}"
    "{% endif %}"
    "{% if message['role'] != 'system' %}{% set state.first = false %}{% endif %}"
    "{% endfor %}"
)


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a last newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def export(work: Path, state: Path, target: Path, shape: Shape) -> None:
    """Write the weights of ``state`` as bfloat16 and the tokenizer of ``work`` as a Hugging Face folder."""
    target.mkdir(parents=True, exist_ok=True)
    model = StoryModel(shape)
    assert load_weights(model, state), f"no weights in {state}"
    tensors = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    for old in target.glob("model*.safetensors"):
        old.unlink()
    parts = split_parts(tensors, PART_BYTES)
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, target / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, name))
    total = sum(value.numel() * 2 for value in tensors.values())
    write_json(target / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    write_json(target / "config.json", config(shape))
    write_json(
        target / "generation_config.json",
        {
            "bos_token_id": END_ID,
            "eos_token_id": END_ID,
            "do_sample": True,
            "temperature": 0.8,
            "top_p": 0.95,
        },
    )
    shutil.copyfile(work / "tokenizer.json", target / "tokenizer.json")
    write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.context,
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def config(shape: Shape) -> dict[str, object]:
    """The Hugging Face configuration of the network."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def read_exported(folder: Path, shape: Shape) -> StoryModel:
    """The network with an exported folder's weights, in float32."""
    model = StoryModel(shape)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors.update(load_file(path))
    model.load_state_dict(tensors)
    return model.eval()


def evaluate(work: Path, folder: Path, shape: Shape, device: torch.device) -> dict[str, object]:
    """Held-out bits per byte, repeat figures and the stories of the fixed prompts, of an exported folder in float32.

    Stories are 200 tokens with the end-of-text token ruled out, so that none is cut short.
    """
    data = Data(work, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = read_exported(folder, shape).to(device)
    stories = []
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
        rows = {
            "greedy": greedy(model, ids, 200, END_ID),
            "sampled": sample(model, ids, 200, END_ID, 0.8, 0.95, seed=number)[None],
        }
        story: dict[str, object] = {"prompt": prompt}
        for name, row in rows.items():
            story[name] = tokenizer.decode(row[0].tolist())
            story[f"{name}_repeats"] = share_repeating(row) > 0
        stories.append(story)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "held_out_bpb": bits_per_byte(model, data.held_out, data.held_out_bytes, precise=True),
        "held_out_prompts_repeating": share_repeating(greedy(model, held_out_prompts(data, 200, 24), 200, END_ID)),
        "greedy_repeating": sum(bool(story["greedy_repeats"]) for story in stories),
        "sampled_repeating": sum(bool(story["sampled_repeats"]) for story in stories),
        "stories": stories,
    }


def compare_with_transformers(work: Path, folder: Path, shape: Shape) -> dict[str, float]:
    """Loss of the first 2,000 held-out tokens here and in ``LlamaForCausalLM``, both float32."""
    from transformers import AutoTokenizer, LlamaForCausalLM  # only needed for this check

    data = Data(work, torch.device("cpu"))
    ids = data.held_out[:2000].long()[None]
    ours = read_exported(folder, shape)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("A fox").input_ids[0] == END_ID
    repeating = 0
    with torch.no_grad():
        here = float(ours.token_losses(ids[:, :-1], ids[:, 1:]).mean())
        there = float(theirs(ids, labels=ids).loss)
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            rows = theirs.generate(**inputs, do_sample=False, min_new_tokens=200, max_new_tokens=200)
            repeating += share_repeating(rows[:, inputs.input_ids.shape[1] :]) > 0
    return {"loss_here": here, "loss_transformers": there, "prompts_repeating": repeating}
