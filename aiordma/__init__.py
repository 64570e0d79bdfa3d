"""Asyncio-native networking over RDMA."""
