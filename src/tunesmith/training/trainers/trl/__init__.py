"""The `trl` trainer: TRL's SFT, DPO and ORPO trainers behind our protocol, with our tokens, checkpoints and endings."""
