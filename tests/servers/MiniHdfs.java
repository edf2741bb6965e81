import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.hadoop.ha.HAServiceProtocol.RequestSource;
import org.apache.hadoop.ha.HAServiceProtocol.StateChangeRequestInfo;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.protocol.HdfsConstants.DatanodeReportType;
import org.apache.hadoop.hdfs.protocol.HdfsConstants.SafeModeAction;
import org.apache.hadoop.hdfs.server.blockmanagement.DatanodeDescriptor;
import org.apache.hadoop.hdfs.server.blockmanagement.DatanodeManager;
import org.apache.hadoop.hdfs.server.datanode.DataNode;
import org.apache.hadoop.hdfs.server.namenode.NameNode;
import org.apache.hadoop.metrics2.lib.DefaultMetricsSystem;

/**
 * NameNodes and DataNodes in one JVM on loopback, for tests.
 *
 * <p>Arguments: directory, number of DataNodes, settings as key=value. Two RPC ports, given as "ports=A,B,C,D" (RPC and
 * HTTP of each NameNode), make an HA pair whose edit log is a shared directory; the first NameNode becomes active.
 * Commands come by standard input, one a line; each is answered by OK or ERR. The end of the input ends the servers.
 */
public class MiniHdfs {
  private static final StateChangeRequestInfo BY_USER = new StateChangeRequestInfo(RequestSource.REQUEST_BY_USER);

  private final File dir;
  private final HdfsConfiguration base = new HdfsConfiguration();
  private final List<HdfsConfiguration> nameNodeSettings = new ArrayList<>();
  private final List<NameNode> nameNodes = new ArrayList<>();
  private final List<DataNode> dataNodes = new ArrayList<>();
  private String[] ports = {};

  public static void main(String[] args) throws Exception {
    DefaultMetricsSystem.setMiniClusterMode(true);
    MiniHdfs servers = new MiniHdfs(new File(args[0]), Integer.parseInt(args[1]), args);
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      try {
        servers.command(line.trim().split(" "));
        System.out.println("OK");
      } catch (Throwable error) {
        System.out.println("ERR " + error);
      }
      System.out.flush();
    }
    Runtime.getRuntime().halt(0);
  }

  private MiniHdfs(File dir, int count, String[] args) throws Exception {
    this.dir = dir;
    settings(count, args);
    if (ports.length == 0) {
      nameNodeSettings.add(single());
    } else {
      nameNodeSettings.add(oneOfPair(0));
      nameNodeSettings.add(oneOfPair(1));
    }
    format();
    for (int i = 0; i < nameNodeSettings.size(); i++) {
      nameNodes.add(startNameNode(i));
    }
    if (ports.length > 0) {
      nameNodes.get(0).getRpcServer().transitionToActive(BY_USER);
    }
    for (int i = 0; i < count; i++) {
      dataNodes.add(startDataNode(i));
    }
    await(nameNodes.get(0));
    NameNode first = nameNodes.get(0);
    System.out.println("READY " + first.getNameNodeAddress().getPort() + " " + first.getHttpAddress().getPort());
    System.out.flush();
  }

  private void settings(int count, String[] args) {
    base.setInt("dfs.replication", Math.min(count, 3));
    base.setInt("dfs.namenode.safemode.extension", 0);
    base.setInt("dfs.namenode.handler.count", 16);
    base.setInt("dfs.ls.limit", 100); // names on a page of a list, of which a server has 1,000
    base.setInt("dfs.heartbeat.interval", 1);
    base.setBoolean("dfs.namenode.edits.noeditlogchannelflush", true); // no fsync: the machine outlives the tests
    base.setInt("dfs.namenode.heartbeat.recheck-interval", 1000);
    base.setBoolean("dfs.namenode.avoid.write.stale.datanode", true);
    base.setInt("dfs.namenode.stale.datanode.interval", 3000);
    base.setInt("dfs.ha.tail-edits.period", 1);
    base.setInt("ipc.client.connect.retry.interval", 100); // of DataNodes that look for a NameNode
    base.setInt("dfs.namenode.fs-limits.min-block-size", 4096);
    base.setBoolean("dfs.namenode.datanode.registration.ip-hostname-check", false);
    for (int i = 2; i < args.length; i++) {
      String[] pair = args[i].split("=", 2);
      if (pair[0].equals("ports")) {
        ports = pair[1].split(",");
      } else {
        base.set(pair[0], pair[1]);
      }
    }
  }

  private HdfsConfiguration single() {
    HdfsConfiguration conf = new HdfsConfiguration(base);
    conf.set("fs.defaultFS", "hdfs://127.0.0.1:0");
    conf.set("dfs.namenode.name.dir", new File(dir, "nn0").toURI().toString());
    conf.set("dfs.namenode.http-address", "127.0.0.1:0");
    return conf;
  }

  private HdfsConfiguration oneOfPair(int index) {
    base.set("fs.defaultFS", "hdfs://pair");
    base.set("dfs.nameservices", "pair");
    base.set("dfs.ha.namenodes.pair", "nn0,nn1");
    base.set("dfs.namenode.shared.edits.dir", new File(dir, "shared").toURI().toString());
    base.set("dfs.ha.fencing.methods", "shell(/bin/true)");
    for (int i = 0; i < 2; i++) {
      base.set("dfs.namenode.rpc-address.pair.nn" + i, "127.0.0.1:" + ports[2 * i]);
      base.set("dfs.namenode.http-address.pair.nn" + i, "127.0.0.1:" + ports[2 * i + 1]);
    }
    HdfsConfiguration conf = new HdfsConfiguration(base);
    conf.set("dfs.ha.namenode.id", "nn" + index);
    conf.set("dfs.namenode.name.dir", new File(dir, "nn" + index).toURI().toString());
    return conf;
  }

  /** Format the first NameNode; the second one of a pair gets a copy of its directory. */
  private void format() throws Exception {
    if (new File(dir, "nn0/current/VERSION").exists()) {
      return;
    }
    HdfsConfiguration conf = new HdfsConfiguration(nameNodeSettings.get(0));
    if (ports.length > 0) {
      NameNode.initializeGenericKeys(conf, "pair", "nn0");
    }
    NameNode.format(conf);
    if (ports.length > 0) {
      Path from = new File(dir, "nn0").toPath();
      Path to = new File(dir, "nn1").toPath();
      List<Path> paths;
      try (Stream<Path> walk = Files.walk(from)) {
        paths = walk.collect(Collectors.toList());
      }
      for (Path path : paths) {
        Files.copy(path, to.resolve(from.relativize(path)));
      }
    }
  }

  private NameNode startNameNode(int index) throws Exception {
    NameNode nameNode = NameNode.createNameNode(new String[] {}, new HdfsConfiguration(nameNodeSettings.get(index)));
    if (ports.length == 0) { // the same ports after a restart
      HdfsConfiguration conf = nameNodeSettings.get(0);
      String rpc = "127.0.0.1:" + nameNode.getNameNodeAddress().getPort();
      conf.set("fs.defaultFS", "hdfs://" + rpc);
      conf.set("dfs.namenode.rpc-address", rpc);
      conf.set("dfs.namenode.http-address", "127.0.0.1:" + nameNode.getHttpAddress().getPort());
      base.set("fs.defaultFS", "hdfs://" + rpc);
      base.set("dfs.namenode.rpc-address", rpc);
    }
    return nameNode;
  }

  private DataNode startDataNode(int index) throws Exception {
    HdfsConfiguration conf = new HdfsConfiguration(base);
    conf.set("dfs.datanode.data.dir", new File(dir, "dn" + index).toURI().toString());
    conf.set("dfs.datanode.address", "127.0.0.1:0");
    conf.set("dfs.datanode.http.address", "127.0.0.1:0");
    conf.set("dfs.datanode.ipc.address", "127.0.0.1:0");
    conf.set("dfs.datanode.hostname", "127.0.0.1");
    return DataNode.createDataNode(new String[] {}, conf);
  }

  /** Wait until a NameNode knows the DataNodes by their present ports: those of before a restart count as alive too. */
  private void await(NameNode nameNode) throws Exception {
    Set<Integer> ports = ports();
    DatanodeManager known = nameNode.getNamesystem().getBlockManager().getDatanodeManager();
    long end = System.currentTimeMillis() + 60_000;
    while (nameNode.isInSafeMode()
        || !known.getDatanodeListForReport(DatanodeReportType.LIVE).stream()
            .map(DatanodeDescriptor::getXferPort)
            .collect(Collectors.toSet())
            .containsAll(ports)) {
      if (System.currentTimeMillis() > end) {
        throw new IllegalStateException("the DataNodes did not come in 60 s");
      }
      Thread.sleep(20);
    }
  }

  /** Let a NameNode find out now that stopped DataNodes are dead; by itself it takes 12 seconds. */
  private void forget(NameNode nameNode) throws Exception {
    Set<Integer> ports = ports();
    DatanodeManager known = nameNode.getNamesystem().getBlockManager().getDatanodeManager();
    for (DatanodeDescriptor one : known.getDatanodeListForReport(DatanodeReportType.LIVE)) {
      if (!ports.contains(one.getXferPort())) {
        known.removeDatanode(one);
      }
    }
  }

  private Set<Integer> ports() {
    return dataNodes.stream().filter(Objects::nonNull).map(DataNode::getXferPort).collect(Collectors.toSet());
  }

  private void command(String[] words) throws Exception {
    int index = words.length > 1 ? Integer.parseInt(words[1]) : 0;
    switch (words[0]) {
      case "safemode-enter" -> nameNodes.get(index).getRpcServer()
          .setSafeMode(SafeModeAction.SAFEMODE_ENTER, false);
      case "safemode-leave" -> nameNodes.get(index).getRpcServer()
          .setSafeMode(SafeModeAction.SAFEMODE_LEAVE, false);
      case "stop-datanode" -> {
        dataNodes.get(index).shutdown();
        dataNodes.set(index, null);
      }
      case "start-datanode" -> {
        if (dataNodes.get(index) == null) {
          dataNodes.set(index, startDataNode(index));
        }
      }
      case "forget-datanodes" -> forget(nameNodes.get(index));
      case "stop-namenode" -> {
        nameNodes.get(index).stop();
        nameNodes.get(index).join();
        nameNodes.set(index, null);
      }
      case "start-namenode" -> {
        if (nameNodes.get(index) == null) {
          nameNodes.set(index, startNameNode(index));
        }
      }
      case "await" -> await(nameNodes.get(index));
      case "standby" -> nameNodes.get(index).getRpcServer().transitionToStandby(BY_USER);
      case "active" -> nameNodes.get(index).getRpcServer().transitionToActive(BY_USER);
      default -> throw new IllegalArgumentException(words[0]);
    }
  }
}
