"""From recorded nodes to plans: strategies, index tables, execution."""
