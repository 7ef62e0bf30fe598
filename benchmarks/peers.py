PEERS: dict = {}
