#!/usr/bin/env bash
# Train on your own text: bash docs/journeys/data_owner.sh ["--data_path=STORE --other_flags" ...]
#
# Prepares text, compressed JSON lines and Parquet as one corpus, trains on it, samples, exports to Hugging Face's
# format, and encodes with the exported tokenizer in transformers, if that is installed. Every STORE is a folder of
# tokens that another tool wrote (save_to_disk, Megatron, Parquet): it is inspected and trained on for three steps, with
# the flags that it needs, such as --sep_token.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=.venv/bin/python
text=data/journey/text
tiny=(--engine=torch --device=cpu --model_variant=tiny --mixed_precision=False --seq_length=128 --batch_size=4 --val_steps=2)

echo "== Text, JSON lines and Parquet"
mkdir -p $text
cp README.md CONTRIBUTING.md $text
$python - $text << 'END'
import gzip, json, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
folder = Path(sys.argv[1])
documents = [path.read_text() for path in sorted(Path("pretraining").rglob("*.py"))]
with gzip.open(folder / "half.jsonl.gz", "wt") as file:
    file.writelines(json.dumps({"text": document}) + "\n" for document in documents[::2])
pq.write_table(pa.table({"text": documents[1::2]}), folder / "half.parquet")
END
$python -m pretraining.tools.prepare --input=$text --output=data/journey/tokens --vocab_size=1024 --valid_every=20

echo "== Train, sample, export"
$python main_training.py --data_path=data/journey/tokens "${tiny[@]}" --num_steps=20 --checkpoint_interval=20 --log_dir=runs/journey
$python -m pretraining.tools.generate runs/journey --prompt="The " --max_new_tokens=20
$python -m pretraining.tools.convert runs/journey runs/journey/exported

if $python -c "import transformers" 2> /dev/null; then
    echo "== In transformers"
    $python - runs/journey/exported << 'END'
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=10, do_sample=False)[0]))
END
fi

number=0
for store in "$@"; do
    echo "== $store"
    number=$((number + 1))
    read -ra flags <<< "$store"
    $python -m pretraining.tools.inspect_data "${tiny[@]}" "${flags[@]}"
    $python main_training.py "${tiny[@]}" "${flags[@]}" --vocab_size=1024 --num_steps=3 \
        --log_dir="runs/journey-$number"
done
