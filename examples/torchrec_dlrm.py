"""TorchRec's DLRM with DCN on generated Criteo rows. Two programs, alike but for where their tables lie:

torchrun --nproc-per-node 2 -m examples.torchrec_dlrm_stock    # sharded over the ranks' own memory

hetrec-ps --listen grpc://127.0.0.1:7070 &
torchrun --nproc-per-node 2 -m examples.torchrec_dlrm          # on a parameter server
"""

import argparse

import torch
import torch.distributed as dist
from torchmetrics.classification import BinaryAUROC
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter

from cache_backend import RemoteStore
from datamodules.synthetic import SyntheticDataModule
from hetrec import HetEmbeddingBagCollection as EmbeddingBagCollection
from hetrec import HetEmbeddingBagCollectionSharder, plan

DIM, LR = 16, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="generated rows")
    parser.add_argument("--batch-size", type=int, default=1024, help="samples a step and rank")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    device = torch.device("cpu")

    data = SyntheticDataModule(rows=arguments.rows, batch_size=arguments.batch_size)
    if dist.get_rank() == 0:
        data.prepare_data()
    dist.barrier()
    data.setup()
    tables = [
        EmbeddingBagConfig(name=t.name, embedding_dim=DIM, num_embeddings=t.num_embeddings, feature_names=[t.name])
        for t in data.spec.tables
    ]

    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    dlrm = DLRM_DCN(collection, len(data.spec.dense), [64, DIM], [64, 1], dcn_num_layers=2, dcn_low_rank_dim=16)
    model = DLRMTrain(dlrm)
    sharders = [HetEmbeddingBagCollectionSharder(RemoteStore(["grpc://127.0.0.1:7070"]))]  # row-wise Adagrad, 0.02
    model = DistributedModelParallel(model, device=device, sharders=sharders, plan=plan(model, sharders))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adagrad(dense.values(), lr=LR)

    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    batches = iter(data.train_dataloader())
    step = 0
    while True:
        try:
            loss, _, _ = pipeline.progress(batches)
        except StopIteration:
            break
        step += 1
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)

    pipeline.detach()
    model.eval()
    auc = BinaryAUROC()
    with torch.no_grad():
        for batch in data.test_dataloader():
            _, (_, logits, labels) = model(batch)
            auc.update(torch.sigmoid(logits), labels.int())
    found = auc.compute()
    if dist.get_rank() == 0:
        print(f"test AUC {found:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
